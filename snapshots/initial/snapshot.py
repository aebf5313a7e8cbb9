"""The initial snapshot: every table under the slot's exported snapshot, read in parallel, appended before the stream.

Exact at the slot's consistent point: it has what committed before, the stream has what commits after, nothing is in
both. Workers import the snapshot before the stream starts, which ends it. No lock beyond ACCESS SHARE.

Its entries end one below that point, and only the last one at it: a sink that has reached the point has every row. A
crash leaves complete pieces in the log. The rows of an unfinished chunk are read again, with the same version and the
same or newer values, which is idempotent; the rest is read in chunks beside the stream (`snapshots.backfill`).
"""

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from cdc import failpoint
from cdc.capture.source.connect import connect, explained
from cdc.capture.source.slot import SlotCreated
from cdc.config.settings import Settings, SourceSettings
from cdc.errors import SourceRefused
from cdc.model import LOG_SCHEMA, Entry, Lsn, TableId, format_lsn
from cdc.ports import LogWriter
from snapshots.initial.plan import PlannedChunk, TablePlan, largest_first, mark_name, plan_table
from snapshots.tables.catalog import find_leaves, identifier, lock_for_read
from snapshots.tables.rows import Readable, ReadStamp, describe, log_rows, masking_of, read_images

Connection = psycopg.Connection[tuple[Any, ...]]

PIECE_ROWS = 65_536
PIECE_BYTES = 64 * 2**20
"""One segment of the log: enough rows for Parquet to compress well, few enough that all pieces fit into memory."""
STATE_MARK = "snapshot"
EXACT_MARK = "history_exact_from"
"""From this LSN on the log's history is exact; before it, some rows were read beside the stream. Empty: not yet."""
_NO_MARKS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """The progress of a snapshot. `estimate` comes from the planner's statistics and may be too high or too low."""

    table: str
    rows: int
    estimate: int
    tables_done: int
    tables: int


Report = Callable[[SnapshotProgress], None]
Ending = Callable[[int], tuple[pa.Table, Mapping[str, str]]]
"""Returns the rows and marks to add to the last entry, given the number of rows that were read."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a chunk; `last`: the chunk ends with them."""

    table: TableId
    chunk: PlannedChunk
    rows: pa.Table
    last: bool


@dataclass(slots=True)
class _Job:
    """One table: how it is read, and its progress."""

    readable: Readable
    plan: TablePlan
    estimate: int


@dataclass(slots=True)
class _Queues:
    """Shared by workers and the appending thread: chunks to read, pieces to append, and whether to stop.

    The queue of pieces is short, so that memory stays bounded while the log is slow.
    """

    chunks: "queue.SimpleQueue[tuple[TableId, PlannedChunk]]" = field(default_factory=queue.SimpleQueue)
    pieces: "queue.Queue[_Piece | BaseException | None]" = field(default_factory=lambda: queue.Queue(2))
    stopped: threading.Event = field(default_factory=threading.Event)

    def put(self, piece: "_Piece | BaseException | None") -> None:
        while not self.stopped.is_set():
            try:
                self.pieces.put(piece, timeout=0.2)
                return
            except queue.Full:
                continue


def run_initial(
    settings: Settings,
    slot: SlotCreated,
    writer: LogWriter,
    report: Report = lambda progress: None,
    stopping: threading.Event | None = None,
    *,
    marks: Mapping[str, str] = _NO_MARKS,
    ending: Ending | None = None,
) -> bool:
    """Append every row of every table whose `snapshot` is `initial`; True: all of it is durable.

    Call it while the slot's connection is open and idle, and start the stream afterwards. `marks` become durable with
    the first entry. Raises SourceRefused, before anything is appended, if a table may not be read in full. Returns
    False if `stopping` was set: the next start then reads the rest in chunks beside the stream.
    """
    source = settings.source
    with _in_snapshot(source, slot) as coordinator:
        jobs = _prepare(coordinator, source, writer)
        stamp = ReadStamp(slot.restart_lsn, Lsn(slot.consistent_point - 1), _now(coordinator))
        _begin(writer, slot, jobs, marks)
        with ExitStack() as stack:
            others = [stack.enter_context(_in_snapshot(source, slot)) for _ in range(1, _workers(source, jobs))]
            connections = [coordinator, *(each for each in others if _locks_without_waiting(each, jobs))]
            _read_all(connections, jobs, _Appender(writer, slot, stamp, jobs, report), stopping)
    whole = all(job.plan.finished for job in jobs.values())
    if whole:
        _end(writer, slot, jobs, ending)
    return whole


def _workers(source: SourceSettings, jobs: dict[TableId, _Job]) -> int:
    return min(source.snapshot_workers, sum(len(job.plan.remaining) for job in jobs.values()))


@contextmanager
def _in_snapshot(source: SourceSettings, slot: SlotCreated) -> Iterator[Connection]:
    """A connection with a transaction in the exported snapshot."""
    with connect(source, "millrace snapshot") as connection:
        with explained("Importing the slot's snapshot"):
            connection.execute("begin isolation level repeatable read read only")
            connection.execute(sql.SQL("set transaction snapshot {}").format(slot.snapshot_name))
        yield connection


def _prepare(connection: Connection, source: SourceSettings, writer: LogWriter) -> dict[TableId, _Job]:
    jobs = {}
    masking = masking_of(source)
    for table in source.tables:
        if table.snapshot != "initial":
            continue
        readable = describe(connection, table, masking)
        lock_for_read(connection, table.name, readable.columns)
        leaves, estimate = find_leaves(connection, table.name)
        plan = plan_table(table.name, leaves, source.snapshot_workers)
        jobs[table.name] = _Job(readable, plan, estimate)
    return {name: _Job(job.readable.recorded(writer.schemas), job.plan, job.estimate) for name, job in jobs.items()}


def _locks_without_waiting(connection: Connection, jobs: dict[TableId, _Job]) -> bool:
    """Whether it got ACCESS SHARE on every table without waiting; if not, the connection is not used.

    A session that requests a stronger lock meanwhile (TRUNCATE, ALTER TABLE) waits for the coordinator. A worker that
    queues behind it would make the coordinator wait for ever: a deadlock that the server cannot detect.
    """
    with explained("Limiting the wait for locks"):
        connection.execute("set local lock_timeout = '1ms'")
    try:
        for name, job in jobs.items():
            lock_for_read(connection, name, job.readable.columns)
    except SourceRefused:  # the coordinator could read the table, so this is the lock timeout
        return False
    return True


def _now(connection: Connection) -> datetime:
    with explained("Reading the server's clock"):
        row = connection.execute("select now()").fetchone()
    assert row is not None
    now: datetime = row[0]
    return now


def _begin(writer: LogWriter, slot: SlotCreated, jobs: dict[TableId, _Job], marks: Mapping[str, str]) -> None:
    plans = {mark_name(name): job.plan.mark() for name, job in jobs.items()}
    state = {STATE_MARK: json.dumps({"state": "reading"}), EXACT_MARK: ""}
    writer.append(Entry(LOG_SCHEMA.empty_table(), _unfinished_end(slot), {**marks, **state, **plans}))


def _end(writer: LogWriter, slot: SlotCreated, jobs: dict[TableId, _Job], ending: Ending | None) -> None:
    count = sum(job.plan.rows for job in jobs.values())
    rows, marks = (LOG_SCHEMA.empty_table(), _NO_MARKS) if ending is None else ending(count)
    state = {STATE_MARK: json.dumps({"state": "done", "rows": count}), EXACT_MARK: format_lsn(slot.consistent_point)}
    writer.append(Entry(rows, slot.consistent_point, {**marks, **state}))


def _unfinished_end(slot: SlotCreated) -> Lsn:
    """The end of every entry but the last one: below the consistent point, as the snapshot is incomplete."""
    return Lsn(slot.consistent_point - 1)


def _read_all(
    connections: Sequence[Connection],
    jobs: dict[TableId, _Job],
    appender: "_Appender",
    stopping: threading.Event | None,
) -> None:
    queues = _Queues()
    for item in largest_first(job.plan for job in jobs.values()):
        queues.chunks.put(item)
    if not connections:
        return
    with ThreadPoolExecutor(len(connections), "snapshot") as pool:
        try:
            for connection in connections:
                pool.submit(_work, connection, jobs, queues)
            _append_all(queues, appender, len(connections), stopping)
        finally:
            queues.stopped.set()


def _append_all(queues: _Queues, appender: "_Appender", workers: int, stopping: threading.Event | None) -> None:
    while workers and not (stopping is not None and stopping.is_set()):
        try:
            item = queues.pieces.get(timeout=0.5)
        except queue.Empty:
            continue
        if isinstance(item, BaseException):
            raise item
        if item is None:
            workers -= 1
        else:
            appender.append(item)


def _work(connection: Connection, jobs: dict[TableId, _Job], queues: _Queues) -> None:
    """One worker: chunk after chunk until there is none, or until an error, which stops all workers."""
    try:
        while not queues.stopped.is_set():
            table, chunk = queues.chunks.get_nowait()
            for piece in _pieces(connection, jobs[table].readable, chunk):
                queues.put(piece)
                if queues.stopped.is_set():
                    return
    except queue.Empty:
        queues.put(None)
    except BaseException as error:  # passed to the appending thread, which raises it
        queues.put(error)


def _pieces(connection: Connection, readable: Readable, chunk: PlannedChunk) -> Iterator[_Piece]:
    """The rows of a chunk in pieces; the last one, perhaps empty, completes the chunk."""
    blocks: list[pa.Table] = []
    rows = size = 0
    for block in read_images(connection, readable, _query(readable, chunk)):
        if blocks and (rows + block.num_rows > PIECE_ROWS or size + block.nbytes > PIECE_BYTES):
            yield _Piece(readable.table, chunk, pa.concat_tables(blocks), last=False)
            blocks, rows, size = [], 0, 0
        blocks.append(block)
        rows += block.num_rows
        size += block.nbytes
    empty = pa.table({"key": pa.array([], pa.string()), "after": pa.array([], pa.string())})
    yield _Piece(readable.table, chunk, pa.concat_tables(blocks) if blocks else empty, last=True)


def _query(readable: Readable, chunk: PlannedChunk) -> sql.Composed:
    conditions = []
    if chunk.first:
        conditions.append(sql.SQL("ctid >= {}::tid").format(f"({chunk.first},0)"))
    if chunk.end is not None:
        conditions.append(sql.SQL("ctid < {}::tid").format(f"({chunk.end},0)"))
    through_root = chunk.leaf.filenode == 0
    return readable.copy_query(
        sql.SQL("{}" if through_root else "only {}").format(identifier(chunk.leaf.name)), *conditions
    )


class _Appender:
    """Numbers the rows in log order, and records a chunk as done in the same entry as its last rows."""

    def __init__(
        self, writer: LogWriter, slot: SlotCreated, stamp: ReadStamp, jobs: dict[TableId, _Job], report: Report
    ) -> None:
        self._writer = writer
        self._slot = slot
        self._stamp = stamp
        self._jobs = jobs
        self._report = report
        self._rows = 0

    def append(self, piece: _Piece) -> None:
        """Durable on return."""
        job = self._jobs[piece.table]
        rows = log_rows(job.readable.layout.schema, piece.rows, self._stamp, self._rows)
        plan = job.plan.advanced(rows.num_rows, piece.chunk.number if piece.last else None)
        failpoint.reached("snapshot.before_append")
        self._writer.append(Entry(rows, _unfinished_end(self._slot), {mark_name(piece.table): plan.mark()}))
        failpoint.reached("snapshot.after_append")
        job.plan = plan
        self._rows += rows.num_rows
        self._report(self._progress(piece.table))

    def _progress(self, table: TableId) -> SnapshotProgress:
        jobs = self._jobs.values()
        done = sum(job.plan.finished for job in jobs)
        return SnapshotProgress(str(table), self._rows, sum(job.estimate for job in jobs), done, len(jobs))

"""The first snapshot: every table under the slot's exported snapshot, read in parallel, appended before the stream.

Exact at the slot's consistent point: what committed before is in it, what commits after is in the stream, nothing is in
both. Workers import the snapshot before anybody starts to stream, since that ends it. No lock beyond ACCESS SHARE.

Its entries end one below that point, and only the last one at it: whoever has reached the point has every row. A crash
leaves whole pieces in the log. Those of an unfinished chunk are read again, with the same version and the same or
newer content, and change nothing twice; what is left is read in chunks beside the stream (`snapshots.backfill`).
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
from snapshots.tables.catalog import find_leaves, identifier, touch
from snapshots.tables.rows import Readable, ReadStamp, describe, log_rows, masking_of, read_images

Connection = psycopg.Connection[tuple[Any, ...]]

PIECE_ROWS = 65_536
PIECE_BYTES = 64 * 2**20
"""One segment of the log: enough rows for Parquet to pay, few enough that all workers' pieces fit into memory."""
STATE_MARK = "snapshot"
EXACT_MARK = "history_exact_from"
"""From this LSN on the log's history is exact; before it, some rows were read beside the stream. Empty until then."""
_NO_MARKS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """How far a snapshot is. `estimate` is the planner's, and may be wrong in either direction."""

    table: str
    rows: int
    estimate: int
    tables_done: int
    tables: int


Report = Callable[[SnapshotProgress], None]
Ending = Callable[[int], tuple[pa.Table, Mapping[str, str]]]
"""Given the number of rows that were read: what the last entry holds besides, rows and marks."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a chunk; `last` when the chunk ends with them."""

    table: TableId
    chunk: PlannedChunk
    rows: pa.Table
    last: bool


@dataclass(slots=True)
class _Job:
    """One table on its way: how it is read, and how far that is."""

    readable: Readable
    plan: TablePlan
    estimate: int


@dataclass(slots=True)
class _Line:
    """What workers and the appending thread share: chunks to read, pieces to append, and whether to go on.

    The pieces are few, so that memory stays bounded while the log is slow.
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
    """Append every row of every table whose `snapshot` is `initial`; on return True all of it is durable.

    Call it while the slot's connection idles, and start to stream afterwards. `marks` become durable with the first
    entry. Raises SourceRefused where a table may not be read in full, before anything is appended. Returns False,
    early, when `stopping` is set: what is missing is then for the next start, in chunks beside the stream.
    """
    source = settings.source
    with _joined(source, slot) as coordinator:
        jobs = _prepare(coordinator, source, writer)
        stamp = ReadStamp(slot.restart_lsn, Lsn(slot.consistent_point - 1), _now(coordinator))
        _begin(writer, slot, jobs, marks)
        with ExitStack() as stack:
            others = [stack.enter_context(_joined(source, slot)) for _ in range(1, _workers(source, jobs))]
            connections = [coordinator, *(each for each in others if _locks_at_once(each, jobs))]
            _read_all(connections, jobs, _Appender(writer, slot, stamp, jobs, report), stopping)
    whole = all(job.plan.finished for job in jobs.values())
    if whole:
        _end(writer, slot, jobs, ending)
    return whole


def _workers(source: SourceSettings, jobs: dict[TableId, _Job]) -> int:
    return min(source.snapshot_workers, sum(len(job.plan.remaining) for job in jobs.values()))


@contextmanager
def _joined(source: SourceSettings, slot: SlotCreated) -> Iterator[Connection]:
    """A connection inside the exported snapshot."""
    with connect(source, "millrace snapshot") as connection:
        with explained("Joining the slot's snapshot"):
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
        touch(connection, table.name, readable.columns)
        leaves, estimate = find_leaves(connection, table.name)
        plan = plan_table(table.name, leaves, source.snapshot_workers)
        jobs[table.name] = _Job(readable, plan, estimate)
    return {name: _Job(job.readable.recorded(writer.schemas), job.plan, job.estimate) for name, job in jobs.items()}


def _locks_at_once(connection: Connection, jobs: dict[TableId, _Job]) -> bool:
    """Whether it got ACCESS SHARE on every table without waiting; if not, it is of no use.

    Somebody who asked for a stronger lock meanwhile (TRUNCATE, ALTER TABLE) waits for the coordinator. A worker that
    queued behind him would make the coordinator wait in turn, for ever, and no server can see that.
    """
    with explained("Limiting the wait for locks"):
        connection.execute("set local lock_timeout = '1ms'")
    try:
        for name, job in jobs.items():
            touch(connection, name, job.readable.columns)
    except SourceRefused:  # the coordinator was allowed to read: what is refused is the lock
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
    writer.append(Entry(LOG_SCHEMA.empty_table(), _meanwhile(slot), {**marks, **state, **plans}))


def _end(writer: LogWriter, slot: SlotCreated, jobs: dict[TableId, _Job], ending: Ending | None) -> None:
    count = sum(job.plan.rows for job in jobs.values())
    rows, marks = (LOG_SCHEMA.empty_table(), _NO_MARKS) if ending is None else ending(count)
    state = {STATE_MARK: json.dumps({"state": "done", "rows": count}), EXACT_MARK: format_lsn(slot.consistent_point)}
    writer.append(Entry(rows, slot.consistent_point, {**marks, **state}))


def _meanwhile(slot: SlotCreated) -> Lsn:
    """Where entries end before the last one: nobody may take the snapshot for whole."""
    return Lsn(slot.consistent_point - 1)


def _read_all(
    connections: Sequence[Connection],
    jobs: dict[TableId, _Job],
    appender: "_Appender",
    stopping: threading.Event | None,
) -> None:
    line = _Line()
    for item in largest_first(job.plan for job in jobs.values()):
        line.chunks.put(item)
    if not connections:
        return
    with ThreadPoolExecutor(len(connections), "snapshot") as pool:
        try:
            for connection in connections:
                pool.submit(_work, connection, jobs, line)
            _append_all(line, appender, len(connections), stopping)
        finally:
            line.stopped.set()


def _append_all(line: _Line, appender: "_Appender", workers: int, stopping: threading.Event | None) -> None:
    while workers and not (stopping is not None and stopping.is_set()):
        try:
            item = line.pieces.get(timeout=0.5)
        except queue.Empty:
            continue
        if isinstance(item, BaseException):
            raise item
        if item is None:
            workers -= 1
        else:
            appender.append(item)


def _work(connection: Connection, jobs: dict[TableId, _Job], line: _Line) -> None:
    """One worker: chunk after chunk until there is none, or an error that ends them all."""
    try:
        while not line.stopped.is_set():
            table, chunk = line.chunks.get_nowait()
            for piece in _pieces(connection, jobs[table].readable, chunk):
                line.put(piece)
                if line.stopped.is_set():
                    return
    except queue.Empty:
        line.put(None)
    except BaseException as error:  # carried to the appending thread, which raises it
        line.put(error)


def _pieces(connection: Connection, readable: Readable, chunk: PlannedChunk) -> Iterator[_Piece]:
    """The rows of a chunk, piece by piece; the last one, perhaps empty, says that the chunk is complete."""
    held: list[pa.Table] = []
    rows = size = 0
    for block in read_images(connection, readable, _query(readable, chunk)):
        if held and (rows + block.num_rows > PIECE_ROWS or size + block.nbytes > PIECE_BYTES):
            yield _Piece(readable.table, chunk, pa.concat_tables(held), last=False)
            held, rows, size = [], 0, 0
        held.append(block)
        rows += block.num_rows
        size += block.nbytes
    empty = pa.table({"key": pa.array([], pa.string()), "after": pa.array([], pa.string())})
    yield _Piece(readable.table, chunk, pa.concat_tables(held) if held else empty, last=True)


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
    """Numbers the rows in the order in which they reach the log, and marks what is done in the same entry."""

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
        self._writer.append(Entry(rows, _meanwhile(self._slot), {mark_name(piece.table): plan.mark()}))
        failpoint.reached("snapshot.after_append")
        job.plan = plan
        self._rows += rows.num_rows
        self._report(self._progress(piece.table))

    def _progress(self, table: TableId) -> SnapshotProgress:
        jobs = self._jobs.values()
        done = sum(job.plan.finished for job in jobs)
        return SnapshotProgress(str(table), self._rows, sum(job.estimate for job in jobs), done, len(jobs))

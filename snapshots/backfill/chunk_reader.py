"""Reads one table in chunks, each between two marks in the WAL. Runs in the backfill thread."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from cdc import failpoint
from cdc.capture.rows.layout import images
from cdc.capture.source import slot
from cdc.capture.source.connect import explained
from cdc.config.settings import SourceSettings
from cdc.errors import SlotLost, SourceRefused
from cdc.model import ZERO_LSN, Lsn, parse_lsn
from cdc.ports import Clock, Schemas
from snapshots.backfill.chunk_order import ChunkOrder, KeyListOrder, KeyOrder, PageOrder, ResumePoint
from snapshots.backfill.jobs import Job
from snapshots.backfill.pace import Pace
from snapshots.backfill.reconcile import Chunk, Merged, PgSnapshot, Reread
from snapshots.backfill.requests import Request, chunk_message, restart_message
from snapshots.backfill.windows import PendingChunk, Windows
from snapshots.tables.catalog import files_of, find_leaves, lock_for_read
from snapshots.tables.copy import read_blocks
from snapshots.tables.rows import Readable, describe, masking_of
from snapshots.tables.wal_messages import write_message

Connection = psycopg.Connection[tuple[Any, ...]]
CurrentJob = Callable[[str], Job | None]
"""The current state of a backfill by id, or None if it is to stop."""

_SETTLE_SECONDS = 5.0
_REREAD_SECONDS = 0.05
_EMPTY = pa.table({"key": pa.nulls(0, pa.string()), "after": pa.nulls(0, pa.string())})


@dataclass(frozen=True, slots=True)
class _Table:
    """A table ready to be read. `key` is in the order of its index; `storable`: resume points may be stored in the
    log."""

    readable: Readable
    key: tuple[str, ...]
    order: ChunkOrder
    estimate: int
    storable: bool
    files: frozenset[int]
    """The files of the pages if it is read by pages; else empty."""

    def can_resume(self, resume: ResumePoint | None) -> bool:
        """Whether reading can continue there: not if the table had another key then."""
        return resume is None or not isinstance(self.order, KeyOrder) or len(resume) == len(self.key)


def _same(job: Job, now: Job | None) -> bool:
    """Whether the backfill is still the one that was started: its table may have begun again meanwhile."""
    return now is not None and now.restarts == job.restarts and now.emptied == job.restarts


class _Rewritten(Exception):
    """The table was rewritten into another file during the chunk."""


@dataclass(frozen=True, slots=True)
class _Read:
    rows: pa.Table
    last: ResumePoint
    snapshot: PgSnapshot
    at: datetime


class TableReader:
    """Reads the table of one backfill over one connection."""

    def __init__(
        self,
        connection: Connection,
        source: SourceSettings,
        schemas: Schemas,
        windows: Windows,
        clock: Clock,
        *,
        secret: str = "",
    ) -> None:
        """`secret` authenticates our own messages."""
        self._connection = connection
        self._secret = secret
        self._floor = ZERO_LSN
        self._source = source
        self._schemas = schemas
        self._windows = windows
        self._clock = clock

    def read(self, job: Job, pace: Pace, current: CurrentJob) -> None:
        """Read chunk after chunk until the table ends or the backfill is to stop."""
        table = self._table(job)
        pace.begin(self._clock.monotonic(), table.estimate)
        self._empty_table(job, pace, current)
        self._wait_for_older_transactions(job, pace, current)
        resume = job.resume if table.can_resume(job.resume) else None
        while _same(job, current(job.id)):
            try:
                following, outcome = self._chunk(job, table, resume, pace, current)
            except SourceRefused:
                if not self._altered(table, job):
                    raise
                following, outcome = resume, Reread("the table's columns have changed")
            except _Rewritten:
                following, outcome = resume, Reread("the table was rewritten")
            if isinstance(outcome, Reread):
                pace.chunk_reread(outcome.smaller)
                self._clock.wait(_REREAD_SECONDS)
                former_key, table = table.key, self._table(job)
                resume = resume if table.key == former_key else None
            elif outcome is None or following is None:
                return
            else:
                resume = following

    def _table(self, job: Job) -> _Table:
        request = job.request
        settings = next((table for table in self._source.tables if table.name == request.table), None)
        if settings is None:
            raise SourceRefused(f"Table {request.table} is not captured.", "Add it to source.tables first.")
        readable = describe(self._connection, settings, masking_of(self._source))
        lock_for_read(self._connection, settings.name, readable.columns)
        readable = readable.recorded(self._schemas)
        leaves, rows = find_leaves(self._connection, settings.name)
        key = readable.key
        conditions = _conditions(request)
        if job.automatic and settings.snapshot == "never":
            conditions.append(
                sql.SQL("false")
            )  # a restart without a snapshot: the log's rows are removed, and none are read
        if request.keys:
            _check_keys(request, key)
            order: ChunkOrder = KeyListOrder(readable, key, request.keys, conditions)
        else:
            order = KeyOrder(readable, key, conditions) if key else PageOrder(readable, leaves, rows, conditions)
        masked = any(name in settings.mask for name in key)
        estimate = len(request.keys) or (0 if conditions else rows)
        storable = not (masked and isinstance(order, KeyOrder))
        by_pages = isinstance(order, PageOrder) and not any(leaf.whole for leaf in leaves)
        files = frozenset(leaf.filenode for leaf in leaves) if by_pages else frozenset[int]()
        return _Table(readable, key, order, estimate, storable, files)

    def _altered(self, table: _Table, job: Job) -> bool:
        """Whether the read was refused only because the table's columns have just changed."""
        with explained("Reading the table's columns again"):
            self._connection.execute("rollback")
        return self._table(job).readable.columns != table.readable.columns

    def _empty_table(self, job: Job, pace: Pace, current: CurrentJob) -> None:
        """Have a truncate of a table that begins again appended to the log, and wait for it."""
        if not job.restarts or job.emptied:
            return
        write_message(self._connection, restart_message(job.id, self._secret), transactional=False)
        pace.waiting = "the stream, to remove the table's former rows"
        while (now := current(job.id)) is not None and not now.emptied:
            self._clock.wait(0.05)

    def _wait_for_older_transactions(self, job: Job, pace: Pace, current: CurrentJob) -> None:
        """Wait for transactions that began before the backfill.

        Changes by transactions older than a table's publication are not in the stream, so a table new to the stream
        waits for all of them. Everything that is not visible then is written after this point. So this point can be the
        version of a table that begins again: it is greater than all its former versions. For other tables a short wait,
        once per process, is enough: for commits from before this process read the stream.
        """
        (began,) = self._one("select pg_current_wal_insert_lsn()::text")
        self._floor = Lsn(parse_lsn(began) - 1) if job.restarts else ZERO_LSN
        if job.request.newest:
            self._floor = Lsn(job.requested_at + 1)
        (newest,) = self._one("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        deadline = self._clock.monotonic() + (0.0 if self._windows.ready else _SETTLE_SECONDS)
        while current(job.id) is not None and (job.new_table or self._clock.monotonic() < deadline):
            (oldest,) = self._one("select pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
            if oldest >= newest:
                break
            pace.waiting = "transactions that began before the backfill"
            self._clock.wait(0.05)
        pace.waiting = ""
        self._windows.ready = True

    def _chunk(
        self, job: Job, table: _Table, resume: ResumePoint | None, pace: Pace, current: CurrentJob
    ) -> tuple[ResumePoint | None, Merged | Reread | None]:
        """Where to continue, and the chunk's outcome; None: the backfill is to stop."""
        version = max(self._restart_lsn(), self._floor)
        pending = PendingChunk(job.id, table.readable.layout.schema)
        token = secrets.token_hex(16)
        began = self._clock.monotonic()
        self._windows.expect(token, pending)
        try:
            write_message(self._connection, chunk_message(high=False, token=token), transactional=False)
            failpoint.reached("backfill.after_low")
            read = self._read(table, resume, pace.limit)
            following = table.order.after(resume, pace.limit, read.rows.num_rows, read.last)
            pending.finished, pending.resume = following is None, following if table.storable else None
            pending.read_at = read.at
            pending.chunk = Chunk(read.rows, read.snapshot, version, table.readable.layout.schema.id)
            failpoint.reached("backfill.before_high")
            write_message(self._connection, chunk_message(high=True, token=token), transactional=False)
            failpoint.reached("backfill.after_high")
            seconds = self._clock.monotonic() - began
            while not pending.done.wait(0.2) and current(job.id) is not None:
                pass
        finally:
            self._windows.forget(token)
        if isinstance(pending.outcome, Merged):
            pace.chunk_done(read.rows.num_rows, read.rows.nbytes, seconds)
        return following, pending.outcome

    def _restart_lsn(self) -> Lsn:
        """The version of rows read from now on: below every change of a transaction that is not yet committed."""
        found = slot.find(self._connection, self._source.slot)
        if found is None:
            raise SlotLost(f"Slot {self._source.slot} does not exist.", "See: millrace doctor")
        return found.restart_lsn

    def _read(self, table: _Table, resume: ResumePoint | None, limit: int) -> _Read:
        with explained(f"Reading table {table.readable.table}"):
            self._connection.execute("begin isolation level repeatable read read only")
        snapshot, at = self._one("select pg_current_snapshot()::text, now()")
        query = table.order.query(resume, limit).as_bytes(self._connection)
        blocks = [_EMPTY]
        last: ResumePoint = ()
        for block in read_blocks(self._connection, query, f"Reading table {table.readable.table}"):
            parsed = table.readable.parse(block)
            key_columns = table.readable.column_indexes(table.key)
            last = tuple(parsed.columns[index].value(parsed.count - 1).decode() for index in key_columns)
            key, after = images(table.readable.layout, parsed)
            blocks.append(pa.table([key, after], names=["key", "after"]))
        files = files_of(self._connection, table.readable.table)
        with explained(f"Reading table {table.readable.table}"):
            self._connection.execute("commit")
        if files is None or (table.files and table.files != files):
            raise _Rewritten
        return _Read(pa.concat_tables(blocks), last, PgSnapshot.parse(snapshot), at)

    def _one(self, query: str) -> tuple[Any, ...]:
        with explained("Querying the source"):
            row = self._connection.execute(query.encode()).fetchone()
        assert row is not None
        return row


def _conditions(request: Request) -> list[sql.Composable]:
    found: list[sql.Composable] = []
    if request.where:
        found.append(sql.SQL("({})").format(sql.SQL(request.where)))
    if request.since:
        column, value = request.since
        found.append(sql.SQL("{} >= {}").format(sql.Identifier(column), sql.Literal(value)))
    return found


def _check_keys(request: Request, key: tuple[str, ...]) -> None:
    if not key or any(len(values) != len(key) for values in request.keys):
        raise SourceRefused(
            f"The keys given for {request.table} do not match its key ({', '.join(key) or 'it has none'}).",
            "Give one value per key column.",
        )

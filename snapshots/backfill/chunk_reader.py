"""One table read in chunks, each between two marks in the WAL. Runs in the backfills' own thread."""

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
from snapshots.backfill.chunk_order import ChunkOrder, KeyListOrder, KeyOrder, PageOrder, Place
from snapshots.backfill.jobs import Job
from snapshots.backfill.pace import Pace
from snapshots.backfill.reconcile import Chunk, Merged, PgSnapshot, Reread
from snapshots.backfill.requests import Request, anew, edge
from snapshots.backfill.windows import PendingChunk, Windows
from snapshots.tables.catalog import files_of, find_leaves, touch
from snapshots.tables.copy import read_blocks
from snapshots.tables.rows import Readable, describe, masking_of
from snapshots.tables.wal_messages import say

Connection = psycopg.Connection[tuple[Any, ...]]
Wanted = Callable[[str], Job | None]
"""The backfill as it stands, or None when it is to stop."""

_SETTLE_SECONDS = 5.0
_REREAD_SECONDS = 0.05
_EMPTY = pa.table({"key": pa.nulls(0, pa.string()), "after": pa.nulls(0, pa.string())})


@dataclass(frozen=True, slots=True)
class _Table:
    """A table ready to be walked. `key` is in the order of its index; `keeps` tells whether a place may be stored."""

    readable: Readable
    key: tuple[str, ...]
    walk: ChunkOrder
    estimate: int
    keeps: bool
    files: frozenset[int]
    """Where the pages lie that it is walked by; empty: it is walked by its key."""

    def fits(self, place: Place | None) -> bool:
        """Whether a walk can go on there: not if the table has had another key then."""
        return place is None or not isinstance(self.walk, KeyOrder) or len(place) == len(self.key)


def _same(job: Job, now: Job | None) -> bool:
    """Whether the backfill is still the one that was begun: its table may have begun again meanwhile."""
    return now is not None and now.anew == job.anew and now.swept == job.anew


class _Rewritten(Exception):
    """The table is in another file than the chunk began in."""


@dataclass(frozen=True, slots=True)
class _Read:
    rows: pa.Table
    last: Place
    snapshot: PgSnapshot
    at: datetime


class TableReader:
    """Reads for one backfill over one connection."""

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
        """`secret` is what our own messages are known by."""
        self._connection = connection
        self._secret = secret
        self._floor = ZERO_LSN
        self._source = source
        self._schemas = schemas
        self._windows = windows
        self._clock = clock

    def read(self, job: Job, pace: Pace, wanted: Wanted) -> None:
        """Chunk after chunk until the table ends, or the backfill is not wanted any more."""
        table = self._table(job)
        pace.begin(self._clock.monotonic(), table.estimate)
        self._forget(job, pace, wanted)
        self._settle(job, pace, wanted)
        place = job.place if table.fits(job.place) else None
        while _same(job, wanted(job.id)):
            try:
                following, outcome = self._chunk(job, table, place, pace, wanted)
            except SourceRefused:
                if not self._altered(table, job):
                    raise
                following, outcome = place, Reread("the table's columns have changed")
            except _Rewritten:
                following, outcome = place, Reread("the table was rewritten")
            if isinstance(outcome, Reread):
                pace.again(outcome.smaller)
                self._clock.wait(_REREAD_SECONDS)
                known, table = table.key, self._table(job)
                place = place if table.key == known else None
            elif outcome is None or following is None:
                return
            else:
                place = following

    def _table(self, job: Job) -> _Table:
        request = job.request
        settings = next((table for table in self._source.tables if table.name == request.table), None)
        if settings is None:
            raise SourceRefused(f"Table {request.table} is not captured.", "Add it to source.tables first.")
        readable = describe(self._connection, settings, masking_of(self._source))
        touch(self._connection, settings.name, readable.columns)
        readable = readable.recorded(self._schemas)
        leaves, rows = find_leaves(self._connection, settings.name)
        key = readable.key
        conditions = _conditions(request)
        if job.automatic and settings.snapshot == "never":
            conditions.append(sql.SQL("false"))  # it came back, and only what the log held of it is to go
        if request.keys:
            _check_keys(request, key)
            walk: ChunkOrder = KeyListOrder(readable, key, request.keys, conditions)
        else:
            walk = KeyOrder(readable, key, conditions) if key else PageOrder(readable, leaves, rows, conditions)
        hidden = any(name in settings.mask for name in key)
        estimate = len(request.keys) or (0 if conditions else rows)
        keeps = not (hidden and isinstance(walk, KeyOrder))
        by_pages = isinstance(walk, PageOrder) and not any(leaf.whole for leaf in leaves)
        files = frozenset(leaf.filenode for leaf in leaves) if by_pages else frozenset[int]()
        return _Table(readable, key, walk, estimate, keeps, files)

    def _altered(self, table: _Table, job: Job) -> bool:
        """Whether a refusal only means that the table has other columns than a moment ago."""
        with explained("Looking at the table again"):
            self._connection.execute("rollback")
        return self._table(job).readable.columns != table.readable.columns

    def _forget(self, job: Job, pace: Pace, wanted: Wanted) -> None:
        """Have the log drop what it holds of a table that begins again, and wait until it has."""
        if not job.anew or job.swept:
            return
        say(self._connection, anew(job.id, self._secret), transactional=False)
        pace.waiting = "the stream, to drop what the table held before"
        while (now := wanted(job.id)) is not None and not now.swept:
            self._clock.wait(0.05)

    def _settle(self, job: Job, pace: Pace, wanted: Wanted) -> None:
        """Wait for what began before us.

        Transactions older than a table's publication write to it unseen, so a table new to the stream waits for all of
        them; whatever is not visible then is written behind this point, which may therefore be the version of a table
        that begins again: above all that its former life has left. Otherwise a short while, once, is enough: for
        commits from before this process looked.
        """
        (began,) = self._one("select pg_current_wal_insert_lsn()::text")
        self._floor = Lsn(parse_lsn(began) - 1) if job.anew else ZERO_LSN
        if job.request.newest:
            self._floor = Lsn(job.asked_at + 1)
        (newest,) = self._one("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        deadline = self._clock.monotonic() + (0.0 if self._windows.settled else _SETTLE_SECONDS)
        while wanted(job.id) is not None and (job.fresh or self._clock.monotonic() < deadline):
            (oldest,) = self._one("select pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
            if oldest >= newest:
                break
            pace.waiting = "transactions that began before the backfill"
            self._clock.wait(0.05)
        pace.waiting = ""
        self._windows.settled = True

    def _chunk(
        self, job: Job, table: _Table, place: Place | None, pace: Pace, wanted: Wanted
    ) -> tuple[Place | None, Merged | Reread | None]:
        """Where the walk goes on, and what became of the chunk; None: the backfill is to stop."""
        version = max(self._restart_lsn(), self._floor)
        pending = PendingChunk(job.id, table.readable.layout.schema)
        token = secrets.token_hex(16)
        began = self._clock.monotonic()
        self._windows.expect(token, pending)
        try:
            say(self._connection, edge(high=False, token=token), transactional=False)
            failpoint.reached("backfill.after_low")
            read = self._read(table, place, pace.limit)
            following = table.walk.after(place, pace.limit, read.rows.num_rows, read.last)
            pending.finished, pending.place = following is None, following if table.keeps else None
            pending.read_at = read.at
            pending.chunk = Chunk(read.rows, read.snapshot, version, table.readable.layout.schema.id)
            failpoint.reached("backfill.before_high")
            say(self._connection, edge(high=True, token=token), transactional=False)
            failpoint.reached("backfill.after_high")
            seconds = self._clock.monotonic() - began
            while not pending.settled.wait(0.2) and wanted(job.id) is not None:
                pass
        finally:
            self._windows.forget(token)
        if isinstance(pending.outcome, Merged):
            pace.went_well(read.rows.num_rows, read.rows.nbytes, seconds)
        return following, pending.outcome

    def _restart_lsn(self) -> Lsn:
        """Below every change of a transaction that is not yet committed: the version of rows read from now on."""
        found = slot.find(self._connection, self._source.slot)
        if found is None:
            raise SlotLost(f"Slot {self._source.slot} is gone.", "See: millrace doctor")
        return found.restart_lsn

    def _read(self, table: _Table, place: Place | None, limit: int) -> _Read:
        with explained(f"Reading table {table.readable.table}"):
            self._connection.execute("begin isolation level repeatable read read only")
        snapshot, at = self._one("select pg_current_snapshot()::text, now()")
        query = table.walk.query(place, limit).as_bytes(self._connection)
        held = [_EMPTY]
        last: Place = ()
        for block in read_blocks(self._connection, query, f"Reading table {table.readable.table}"):
            parsed = table.readable.parse(block)
            last = tuple(parsed.columns[at].value(parsed.count - 1).decode() for at in table.readable.places(table.key))
            key, after = images(table.readable.layout, parsed)
            held.append(pa.table([key, after], names=["key", "after"]))
        files = files_of(self._connection, table.readable.table)
        with explained(f"Reading table {table.readable.table}"):
            self._connection.execute("commit")
        if files is None or (table.files and table.files != files):
            raise _Rewritten
        return _Read(pa.concat_tables(held), last, PgSnapshot.parse(snapshot), at)

    def _one(self, query: str) -> tuple[Any, ...]:
        with explained("Asking the source"):
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
            f"The keys given for {request.table} do not fit its key ({', '.join(key) or 'it has none'}).",
            "Give one value per key column.",
        )

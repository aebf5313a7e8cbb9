"""The held-back tables of one sink: paused ones, and waiting ones, which the store cannot take now and are retried.

A held-back table has its own consumer in the log, registered before its first change is left out of a batch: retention
keeps the changes, and a crash loses none. Once released, the changes are applied in order. The trap: live changes of
the table must wait until the last held-back change is applied, or a partial row would keep columns that are too old.

A skipped table, or one that left the pipeline while it was held back, has no consumer: its changes are dropped. When it
comes back, its rows are removed from this store only, and a backfill reads the present ones, or the view emits them.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from cdc import backoff
from cdc.errors import MillraceError, TableRefused
from cdc.model import ZERO_LSN, TableId
from cdc.ports import Batch, Consumer, LogReader, Offset, Slice
from cdc.service.apply.refill import Refill
from cdc.service.state.sink_positions import by_name, consumer_name
from cdc.service.state.skipped_tables import SkippedTables
from sinks.apply.applier import Applier
from sinks.fold.arrow import ranked
from sinks.fold.folded import Folded, gather
from sinks.fold.spark import FOLDED

_BATCH_ROWS = 20_000
_NEAR = 1000
"""The last changes, fewer than this, are applied while the sink's own batches wait."""
_FIRST_SECONDS, _LONGEST_SECONDS = 5.0, 300.0
"""Between two tries of a waiting table. Each try reads its changes up to the one that the store refuses."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TableRequests:
    """What users request of one sink's tables: `tables` of the sink (empty: all), paused ones, skipped ones.
    `resumed` grows with each resume request."""

    tables: frozenset[TableId] = frozenset()
    paused: frozenset[TableId] = frozenset()
    skipped: frozenset[TableId] = frozenset()
    views: frozenset[TableId] = frozenset()
    """Those of the pipeline's tables that are views."""
    resumed: int = 0

    def has(self, table: TableId) -> bool:
        """Whether the sink receives a table."""
        return not self.tables or table in self.tables


@dataclass(frozen=True, slots=True)
class WaitingTable:
    """Why a table waits, since when, and when it is retried (monotonic)."""

    message: str
    remedy: str
    since: datetime
    tries: int
    due: float

    def facts(self, sink: str, table: TableId) -> dict[str, object]:
        """For the status."""
        remedy = (
            f"{self.remedy} It is retried automatically, and at once with: millrace resume {table} --sink {sink} "
            f"(to continue without it: millrace skip {table} --sink {sink})"
        )
        since = self.since.isoformat(timespec="seconds")
        return {"message": self.message, "remedy": remedy.strip(), "since": since, "tries": self.tries}


class HeldBackTables:
    """One sink's held-back tables. The thread that applies calls `refuse`; one other thread calls the rest."""

    def __init__(
        self, log: LogReader, applier: Applier, skipped: SkippedTables, refill: Refill, requests: TableRequests
    ) -> None:
        self.skipped = skipped
        self.waiting: Mapping[TableId, WaitingTable] = {}
        self.requests = requests
        self._sink = applier.name
        self._log = log
        self._applier = applier
        self._refill = refill
        self._resumed = requests.resumed
        applier.tables = requests.tables
        applier.refuse = self.refuse

    def restore(self) -> None:
        """Hold back what was held back when the last process ended. Call it before the first batch."""
        names = self._consumers()
        tables = (schema.table for schema in self._log.schemas.newest())
        held_back = {table for table in tables if consumer_name(self._sink, table) in names}
        self._applier.held_back = frozenset(held_back | self.skipped.dropping())

    def follow(self, requests: TableRequests) -> None:
        """Hold back what is requested, and release the rest once it has caught up. May take long; raises Stopped."""
        self.requests, self._applier.tables = requests, requests.tables
        retry, self._resumed = requests.resumed != self._resumed, requests.resumed
        for table in sorted(table for table in self._applier.held_back | requests.skipped if self._must_skip(table)):
            self._skip(table)
        for table in sorted(requests.paused - self._applier.held_back):
            self._hold_back(table)
        for table in sorted(self._applier.held_back - requests.paused - self.skipped_now()):
            if requests.has(table) and (retry or self._due(table)):
                self._try_release(table)

    def refuse(self, table: TableId, error: TableRefused) -> None:
        """The store cannot take a table: it waits from the sink's position on, or is skipped if it left the sink."""
        if not self.requests.has(table):
            self._skip(table)
            return
        if table not in self._applier.held_back:
            self._hold_back(table)
        self._wait(table, error)

    def skipped_now(self) -> frozenset[TableId]:
        """The tables that are skipped on request."""
        return self.requests.skipped & self.skipped.dropping()

    def paused_now(self) -> frozenset[TableId]:
        """The tables that are held back because they are paused."""
        return (self._applier.held_back & self.requests.paused) - self.skipped.dropping()

    # -- one table

    def _must_skip(self, table: TableId) -> bool:
        wanted = self.requests.has(table) and table not in self.requests.skipped
        return not wanted and table not in self.skipped.dropping()

    def _due(self, table: TableId) -> bool:
        waiting = self.waiting.get(table)
        return waiting is None or time.monotonic() >= waiting.due

    def _hold_back(self, table: TableId) -> None:
        with self._applier.lock:
            known = self._consumers().get(self._sink)
            position = (known.reached, known.offset) if known else (ZERO_LSN, None)
            self._log.commit(consumer_name(self._sink, table), *position)
            self._applier.held_back |= {table}
        _log.info("sink %s: %s is held back", self._sink, table)

    def _skip(self, table: TableId) -> None:
        """Drop its changes from now on. No row of it in the store is newer than the present head of the log."""
        with self._applier.lock:
            known = self._consumers()
            position = known.get(consumer_name(self._sink, table)) or known.get(self._sink)
            self.skipped.add(table, position.reached if position else ZERO_LSN, self._log.head()[1])
            self._applier.held_back |= {table}
            self._forget_waiting(table)
        self._log.forget(consumer_name(self._sink, table))
        _log.warning("sink %s continues without %s", self._sink, table)

    def _wait(self, table: TableId, error: MillraceError) -> None:
        before = self.waiting.get(table)
        tries = before.tries + 1 if before else 1
        due = time.monotonic() + backoff.delay(tries, _FIRST_SECONDS, _LONGEST_SECONDS)
        since = before.since if before else datetime.now(UTC)
        with self._applier.lock:
            self.waiting = {**self.waiting, table: WaitingTable(error.message, error.remedy, since, tries, due)}
        if before is None or before.message != error.message:
            _log.warning("sink %s: %s waits, the other tables continue: %s", self._sink, table, error)

    def _forget_waiting(self, table: TableId) -> None:
        with self._applier.lock:
            self.waiting = {name: one for name, one in self.waiting.items() if name != table}

    def _try_release(self, table: TableId) -> None:
        try:
            if table in self.skipped.dropping():
                self._request_refill(table)
            elif table in self.waiting:
                self._applier.try_table(table)
            self._remove_rows(table)
            self._release(table)
        except TableRefused as error:
            self._wait(table, error)

    def _request_refill(self, table: TableId) -> None:
        """Hold back a table that was skipped, and request a backfill: the log keeps the rows, also while the store
        cannot take them, and records the table's present columns.

        A crash in the middle repeats it. Raises TableRefused if it cannot be done now.
        """
        since = self.skipped.all()[table].since
        try:
            if table not in self.requests.views and not self._refill.reads_newer_than(since):
                raise MillraceError(
                    f"{table} was skipped, and a transaction that began before that is still open in the source.",
                    "The table is refilled when that transaction has ended.",
                )
            if consumer_name(self._sink, table) not in self._consumers():
                self._hold_back(table)
            request = self._refill.emit_again if table in self.requests.views else self._refill.request
            self.skipped.refilling(table, request(table))
        except MillraceError as error:
            raise TableRefused(str(table), error) from error

    def _remove_rows(self, table: TableId) -> None:
        """Remove the rows that this store had when the table was skipped, once, before anything newer is applied.

        Rows that a view hands over again may be older than that: its table is recreated.
        """
        skipped = self.skipped.all().get(table)
        if skipped is None or skipped.emptied:
            return
        schema = next((one for one in self._log.schemas.newest() if one.table == table), None)
        recreated = schema is not None and table in self.requests.views and self._applier.recreate(schema)
        if schema is not None and not recreated:
            batch = Batch(schema, FOLDED.empty_table(), skipped.since + 1)
            self._applier.catch_up(Folded(ZERO_LSN, None, [batch]))
        self.skipped.emptied(table)

    def _release(self, table: TableId) -> None:
        name = consumer_name(self._sink, table)
        offset = self._consumers()[name].offset
        while True:
            offset, changes = self._catch_up(table, offset)
            if changes < _NEAR:
                break
        with self._applier.lock:
            self._catch_up(table, offset)
            self._applier.held_back -= {table}
            self._forget_waiting(table)
        self._log.forget(name)
        _log.info("sink %s: %s has caught up and is released", self._sink, table)

    def _consumers(self) -> Mapping[str, Consumer]:
        return by_name(self._log.consumers())

    def _catch_up(self, table: TableId, after: Offset) -> tuple[Offset, int]:
        """Apply a table's changes after an offset; returns the offset where they end, and their number."""
        changes, offset = 0, after
        for rows, piece in _batches(self._log.read(after), str(table)):
            if rows.num_rows:
                batch = gather(ranked(rows), self._log.schemas)
                self._applier.catch_up(replace(batch, reached=ZERO_LSN))
            self._log.commit(consumer_name(self._sink, table), piece.end, piece.offset)
            changes, offset = changes + rows.num_rows, piece.offset
        return offset, changes


def _batches(slices: Iterable[Slice], table: str) -> Iterator[tuple[pa.Table, Slice]]:
    """The rows of a table in batches, each with its last slice."""
    pending: list[pa.Table] = []
    last: Slice | None = None
    for last in slices:
        pending.append(last.rows.filter(pc.field("table") == table))
        if sum(rows.num_rows for rows in pending) >= _BATCH_ROWS:
            yield pa.concat_tables(pending), last
            pending = []
    if pending and last is not None:
        yield pa.concat_tables(pending), last

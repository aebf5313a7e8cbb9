"""Tables held back from one sink, and brought up to date, in order, when they go on: paused ones, and those that the
store cannot take, which wait alone and are tried again now and then.

A hold is a consumer of the log of its own, registered before the first change is passed over: retention keeps what the
sink has yet to get, and a crash loses nothing. The trap: live changes of the table must wait until the last one that
was passed over is applied, or a partial row would keep columns that are too old.

A table that is skipped, or that left the pipeline while it was held, has no such place: its changes are passed over for
good. When it comes back, its rows are removed from this store alone, and a backfill brings those that there are.
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

_AT_ONCE = 20_000
_NEAR = 1000
"""So few changes left to catch up with are applied while the sink's own batches wait."""
_FIRST_SECONDS, _LONGEST_SECONDS = 5.0, 300.0
"""Between two tries of a table that waits. Each reads what was held back up to the change that is refused."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TableRequests:
    """What is asked of one sink's tables: those that it is given (none: all), those that are paused, those that are
    skipped; `resumed` grows with each request to resume."""

    given: frozenset[TableId] = frozenset()
    paused: frozenset[TableId] = frozenset()
    skipped: frozenset[TableId] = frozenset()
    resumed: int = 0

    def has(self, table: TableId) -> bool:
        """Whether the sink is given a table."""
        return not self.given or table in self.given


@dataclass(frozen=True, slots=True)
class WaitingTable:
    """Why a table waits, since when, and when it is tried again (monotonic)."""

    message: str
    remedy: str
    since: datetime
    tries: int
    due: float

    def facts(self, sink: str, table: TableId) -> dict[str, object]:
        """For the status."""
        said = (
            f"{self.remedy} It is tried again by itself, and at once with: millrace resume {table} --sink {sink} "
            f"(to go on without it: millrace skip {table} --sink {sink})"
        )
        since = self.since.isoformat(timespec="seconds")
        return {"message": self.message, "remedy": said.strip(), "since": since, "tries": self.tries}


class PausedTables:
    """One sink's held tables. `refuse` is called by whoever applies, the rest by one thread."""

    def __init__(
        self, log: LogReader, applier: Applier, skipped: SkippedTables, refill: Refill, wishes: TableRequests
    ) -> None:
        self.skipped = skipped
        self.waiting: Mapping[TableId, WaitingTable] = {}
        self.wishes = wishes
        self._sink = applier.name
        self._log = log
        self._applier = applier
        self._refill = refill
        self._resumed = wishes.resumed
        applier.tables = wishes.given
        applier.refuse = self.refuse

    def restore(self) -> None:
        """Hold what was held when the last process ended. Call before the first batch."""
        names = self._consumers()
        tables = (schema.table for schema in self._log.schemas.newest())
        held = {table for table in tables if consumer_name(self._sink, table) in names}
        self._applier.held = frozenset(held | self.skipped.passed_over())

    def follow(self, wishes: TableRequests) -> None:
        """Hold what is to be held, and let go of the rest once it has caught up. May take long; raises Stopped."""
        self.wishes, self._applier.tables = wishes, wishes.given
        again, self._resumed = wishes.resumed != self._resumed, wishes.resumed
        for table in sorted(table for table in self._applier.held | wishes.skipped if self._unwanted(table)):
            self._give_up(table)
        for table in sorted(wishes.paused - self._applier.held):
            self._hold(table)
        for table in sorted(self._applier.held - wishes.paused - self.skipped_now()):
            if wishes.has(table) and (again or self._due(table)):
                self._let_go(table)

    def refuse(self, table: TableId, error: TableRefused) -> None:
        """The store cannot take a table: it waits alone from the sink's position on; one that has left is given up."""
        if not self.wishes.has(table):
            self._give_up(table)
            return
        if table not in self._applier.held:
            self._hold(table)
        self._wait(table, error)

    def skipped_now(self) -> frozenset[TableId]:
        """The tables that are given up on request."""
        return self.wishes.skipped & self.skipped.passed_over()

    def paused_now(self) -> frozenset[TableId]:
        """The tables that are held because they are paused."""
        return (self._applier.held & self.wishes.paused) - self.skipped.passed_over()

    # -- one table

    def _unwanted(self, table: TableId) -> bool:
        wanted = self.wishes.has(table) and table not in self.wishes.skipped
        return not wanted and table not in self.skipped.passed_over()

    def _due(self, table: TableId) -> bool:
        waiting = self.waiting.get(table)
        return waiting is None or time.monotonic() >= waiting.due

    def _hold(self, table: TableId) -> None:
        with self._applier.turn:
            known = self._consumers().get(self._sink)
            place = (known.reached, known.offset) if known else (ZERO_LSN, None)
            self._log.commit(consumer_name(self._sink, table), *place)
            self._applier.held |= {table}
        _log.info("sink %s: %s is held", self._sink, table)

    def _give_up(self, table: TableId) -> None:
        """Keep nothing for it any more. No row of it in the store is newer than the head of the log is now."""
        with self._applier.turn:
            known = self._consumers()
            place = known.get(consumer_name(self._sink, table)) or known.get(self._sink)
            self.skipped.add(table, place.reached if place else ZERO_LSN, self._log.head()[1])
            self._applier.held |= {table}
            self._forget_waiting(table)
        self._log.forget(consumer_name(self._sink, table))
        _log.warning("sink %s goes on without %s", self._sink, table)

    def _wait(self, table: TableId, error: MillraceError) -> None:
        before = self.waiting.get(table)
        tries = before.tries + 1 if before else 1
        due = time.monotonic() + backoff.delay(tries, _FIRST_SECONDS, _LONGEST_SECONDS)
        since = before.since if before else datetime.now(UTC)
        with self._applier.turn:
            self.waiting = {**self.waiting, table: WaitingTable(error.message, error.remedy, since, tries, due)}
        if before is None or before.message != error.message:
            _log.warning("sink %s: %s waits, the others go on: %s", self._sink, table, error)

    def _forget_waiting(self, table: TableId) -> None:
        with self._applier.turn:
            self.waiting = {name: one for name, one in self.waiting.items() if name != table}

    def _let_go(self, table: TableId) -> None:
        try:
            if table in self.skipped.passed_over():
                self._ask_again(table)
            elif table in self.waiting:
                self._applier.probe(table)
            self._remove_rows(table)
            self._release(table)
        except TableRefused as error:
            self._wait(table, error)

    def _ask_again(self, table: TableId) -> None:
        """Hold a table that was passed over, and have it read again: the log keeps what is read, also while the store
        cannot take it, and learns the table's columns as they are now.

        A crash in the middle has it done again. Raises TableRefused where it cannot be done now.
        """
        since = self.skipped.all()[table].since
        try:
            if not self._refill.beats(since):
                raise MillraceError(
                    f"{table} was passed over, and a transaction of the source is open since before.",
                    "It is filled again when that has ended.",
                )
            if consumer_name(self._sink, table) not in self._consumers():
                self._hold(table)
            self.skipped.refilling(table, self._refill.ask(table))
        except MillraceError as error:
            raise TableRefused(str(table), error) from error

    def _remove_rows(self, table: TableId) -> None:
        """Empty this store's table of what it held when it was skipped, once, before anything newer is applied."""
        skipped = self.skipped.all().get(table)
        if skipped is None or skipped.emptied:
            return
        schema = next((one for one in self._log.schemas.newest() if one.table == table), None)
        if schema is not None:
            batch = Batch(schema, FOLDED.empty_table(), skipped.since + 1)
            self._applier.catch_up(Folded(ZERO_LSN, None, [batch]))
        self.skipped.emptied(table)

    def _release(self, table: TableId) -> None:
        name = consumer_name(self._sink, table)
        place = self._consumers()[name].offset
        while True:
            place, changes = self._catch_up(table, place)
            if changes < _NEAR:
                break
        with self._applier.turn:
            self._catch_up(table, place)
            self._applier.held -= {table}
            self._forget_waiting(table)
        self._log.forget(name)
        _log.info("sink %s: %s has caught up and goes on", self._sink, table)

    def _consumers(self) -> Mapping[str, Consumer]:
        return by_name(self._log.consumers())

    def _catch_up(self, table: TableId, after: Offset) -> tuple[Offset, int]:
        """Apply what the log has of a table after a place; returns where that ends and how much it was."""
        changes, place = 0, after
        for rows, piece in _pieces(self._log.read(after), str(table)):
            if rows.num_rows:
                batch = gather(ranked(rows), self._log.schemas)
                self._applier.catch_up(replace(batch, reached=ZERO_LSN))
            self._log.commit(consumer_name(self._sink, table), piece.end, piece.offset)
            changes, place = changes + rows.num_rows, piece.offset
        return place, changes


def _pieces(slices: Iterable[Slice], table: str) -> Iterator[tuple[pa.Table, Slice]]:
    """The rows of a table, some thousands at a time, each with the slice that it ends with."""
    waiting: list[pa.Table] = []
    last: Slice | None = None
    for last in slices:
        waiting.append(last.rows.filter(pc.field("table") == table))
        if sum(rows.num_rows for rows in waiting) >= _AT_ONCE:
            yield pa.concat_tables(waiting), last
            waiting = []
    if waiting and last is not None:
        yield pa.concat_tables(waiting), last

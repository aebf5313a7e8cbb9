"""Tables held back from one sink while they are paused, and brought up to date, in order, when they are resumed.

A hold is a consumer of the log of its own, registered before the first change is passed over: retention keeps what the
sink has yet to get, and a crash loses nothing. The trap: live changes of the table must wait until the last one that
was passed over is applied, or a partial row would keep columns that are too old.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from cdc.model import ZERO_LSN, TableId
from cdc.ports import Consumer, LogReader, Offset, Slice
from cdc.service.places import consumer_name
from sinks.applier import Applier
from sinks.fold_arrow import ranked
from sinks.folded import gather

_AT_ONCE = 20_000
_NEAR = 1000
"""So few changes left to catch up with are applied while the sink's own batches wait."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holds:
    """One sink's held tables. Called by one thread."""

    sink: str
    log: LogReader
    applier: Applier

    def restore(self) -> None:
        """Hold what was held when the last process ended. Call before the first batch."""
        names = self._consumers()
        tables = (schema.table for schema in self.log.schemas.newest())
        self.applier.held = frozenset(table for table in tables if consumer_name(self.sink, table) in names)

    def follow(self, wanted: frozenset[TableId]) -> None:
        """Hold what is wanted, and let go of the rest once it has caught up. May take long; raises Stopped."""
        for table in sorted(wanted - self.applier.held):
            self._hold(table)
        for table in sorted(self.applier.held - wanted):
            self._release(table)

    def _hold(self, table: TableId) -> None:
        with self.applier.turn:
            known = self._consumers().get(self.sink)
            place = (known.reached, known.offset) if known else (ZERO_LSN, None)
            self.log.commit(consumer_name(self.sink, table), *place)
            self.applier.held |= {table}
        _log.info("sink %s: %s is held", self.sink, table)

    def _release(self, table: TableId) -> None:
        name = consumer_name(self.sink, table)
        place = self._consumers()[name].offset
        while True:
            place, changes = self._catch_up(table, place)
            if changes < _NEAR:
                break
        with self.applier.turn:
            self._catch_up(table, place)
            self.applier.held -= {table}
        self.log.forget(name)
        _log.info("sink %s: %s has caught up and goes on", self.sink, table)

    def _consumers(self) -> Mapping[str, Consumer]:
        return {consumer.name: consumer for consumer in self.log.consumers()}

    def _catch_up(self, table: TableId, after: Offset) -> tuple[Offset, int]:
        """Apply what the log has of a table after a place; returns where that ends and how much it was."""
        changes, place = 0, after
        for rows, piece in _pieces(self.log.read(after), str(table)):
            if rows.num_rows:
                batch = gather(ranked(rows), self.log.schemas)
                self.applier.catch_up(replace(batch, reached=ZERO_LSN))
            self.log.commit(consumer_name(self.sink, table), piece.end, piece.offset)
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

"""Changes of one captured table as events in time: every change by itself, with its event time and the clock before it.

Unlike `InputTable`, nothing is netted within a batch: whether a change is late depends on its own place in the log.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Ints
from cdc.model import TICKS_TABLE, TableId
from views.dataflow.changes import Chains, InputTable, legs
from views.dataflow.delta import ID, delta_schema, signed
from views.state.table import StateTable
from views.time.clock import NEVER, EventClock, LogRows

TIME, SEEN, NOW = "_time", "_seen", "_now"
"""Microseconds: the event time of the row, the clock when the row came, the clock at the change."""
_STORED: list[tuple[str, pa.DataType]] = [(TIME, pa.int64()), (SEEN, pa.int64())]
_CLOCK = pa.schema([pa.field("greatest", pa.int64()), pa.field("newest", pa.int64())])


class Events(InputTable):
    """The changes of a table with their times. Rows without an event time are left out, and counted."""

    def __init__(
        self, table: TableId, columns: Sequence[str], time: Callable[[pa.Table], AnyArray] | None, idle: int
    ) -> None:
        """`time` computes event times (microseconds) from rows of cells; None: the time of the commit."""
        cells: list[tuple[str, pa.DataType]] = [(name, pa.string()) for name in columns]
        super().__init__(table, columns, StateTable(pa.schema([(ID, pa.string()), *cells, *_STORED])))
        self.clock = StateTable(_CLOCK)
        self.exact_from = 2**63 - 1
        """Changes below this LSN are the initial snapshot: never late, because their order is not that of time."""
        self.loading = True
        """Whether the snapshot is still being read: no window closes."""
        self._clock = EventClock()
        self._time = time
        self._idle = idle
        self._legs_schema = delta_schema(pa.schema([*cells, *_STORED, (NOW, pa.int64())]))

    @property
    def greatest(self) -> int:
        """The clock after the last batch, in microseconds; NEVER before the first row."""
        return self._clock.greatest

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables whose rows it reads."""
        return (str(self.table), TICKS_TABLE)

    @property
    def states(self) -> dict[str, StateTable]:
        """The state."""
        return {"": self.state, " clock": self.clock}

    def step(self, rows: pa.Table) -> pa.Table:
        """Every change as the row before and the row after it."""
        for stored in self.clock.scan():
            self._clock = EventClock(*(stored.column(name)[0].as_py() for name in ("greatest", "newest")))
        found = [self._legs_schema.empty_table(), *self._parts(rows.combine_chunks())]
        now = {"greatest": pa.array([self._clock.greatest]), "newest": pa.array([self._clock.newest])}
        one = pa.array(["clock"])
        self.clock.put(one, one, np.ones(1, np.bool_), pa.table(now, _CLOCK))
        return pa.concat_tables(found).combine_chunks()

    def _removed(self, change: dict[str, Any]) -> pa.Table:
        rows = self._taken(change)
        now = NEVER if change["commit_lsn"] < self.exact_from else self._clock.greatest
        return self._leg_rows(rows, np.full(rows.num_rows, -1, np.int8), np.full(rows.num_rows, now))

    def _changed(self, rows: pa.Table) -> pa.Table:
        """The changes between two truncates, with the clock moved along."""
        tick = pc.equal(rows.column("table"), pa.scalar(TICKS_TABLE)).to_numpy(zero_copy_only=False)
        mine = rows.filter(pa.array(~tick))
        chains = self._filled(mine) if mine.num_rows else None
        times = np.full(rows.num_rows, NEVER, np.int64)
        places = np.flatnonzero(~tick)
        committed = rows.column("commit_ts").cast(pa.int64()).to_numpy()
        if chains is not None:
            own = self._times(chains.columns, committed[places], chains.change)
            changed = chains.change >= 0
            times[places[chains.change[changed]]] = own[changed]
            times[places[chains.change[changed & ~chains.alive]]] = NEVER
        times[tick] = committed[tick]
        lsns = rows.column("commit_lsn").to_numpy()
        before, self._clock = self._clock.along(LogRows(lsns, times, committed, tick), self._idle)
        if chains is None:
            return self._legs_schema.empty_table()
        exempt = lsns < self.exact_from
        now = np.where(exempt, NEVER, before)[places]
        return self._legs_of(chains, own, now)

    def _legs_of(self, chains: Chains, own: Ints, now: Ints) -> pa.Table:
        changed = np.flatnonzero(chains.change >= 0)
        seen = chains.columns.column(SEEN).to_numpy().copy()
        seen[changed] = now[chains.change[changed]]
        columns = chains.columns.drop_columns([TIME, SEEN])
        columns = columns.append_column(TIME, pa.array(own)).append_column(SEEN, pa.array(seen))
        self._keep(chains, columns)
        place, sign, change = legs(chains)
        rows = columns.add_column(0, ID, chains.ids).take(place)
        return self._leg_rows(rows, sign, now[change])

    def _leg_rows(self, rows: pa.Table, sign: npt.NDArray[np.int8], now: Ints) -> pa.Table:
        columns = rows.select([ID, *self.columns, TIME, SEEN]).append_column(NOW, pa.array(now, pa.int64()))
        found = signed(columns, sign)
        return found.filter(pc.greater(found.column(TIME), pa.scalar(NEVER)))

    def _times(self, columns: pa.Table, committed: Ints, change: Ints) -> Ints:
        """The event time of each row of the chains; NEVER for a row without one."""
        own: Ints = columns.column(TIME).to_numpy().copy()
        mine = change >= 0
        if self._time is None:
            own[mine] = committed[change[mine]]
        else:
            found = self._time(columns.filter(pa.array(mine)))
            own[mine] = found.fill_null(NEVER).to_numpy(zero_copy_only=False)
        return own

"""Windows of event time: which windows a row is in, when they close, and what is emitted then."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Ints
from views.dataflow.aggregate import WINDOW_END
from views.dataflow.delta import ID, SIGN, delta_schema, net, signed
from views.dataflow.events import NOW, SEEN, TIME
from views.state.key_hash import hashes
from views.state.table import StateTable, own_columns
from views.time.clock import NEVER
from views.time.emit import Emit

START, END = "window_start", WINDOW_END
LATE, FINAL, WATERMARK = "late", "final", "watermark"

TIMESTAMP = pa.timestamp("us", tz="UTC")
_FOREVER = 2**62
_COUNT = pa.schema([pa.field("dropped", pa.int64())])
_CLOSED = pa.schema([pa.field("watermark", pa.int64())])


class Assigned:
    """Gives each change its windows. Changes of windows that are closed for good are dropped and counted.

    A window closes when the clock has passed its end by the lateness; for `grace` longer, changes still correct it.
    """

    def __init__(self, size: int, every: int, lateness: int, grace: int) -> None:
        """`size` 0: one window for all time. `every` 0: the windows depend on the rows (sessions, sliding windows); a
        row is then late if its own time has passed, so that it cannot change a window that has closed."""
        self._size, self._every = size, every
        self._lateness, self._grace = lateness, grace
        self.counts = StateTable(_COUNT)

    @property
    def tables(self) -> dict[str, StateTable]:
        """The state."""
        return {"late": self.counts}

    @property
    def dropped(self) -> int:
        """How many changes came after their window had closed for good."""
        return sum(stored.column("dropped")[0].as_py() for stored in self.counts.scan())

    def step(self, delta: pa.Table) -> pa.Table:
        """A row for each window, with START, END and LATE: whether the row came when the window had closed."""
        row, start, end = self._windows(delta.column(TIME).to_numpy())
        now, seen = (delta.column(name).to_numpy()[row] for name in (NOW, SEEN))
        taken = end + self._grace > now - self._lateness
        self._count(int((~taken & (delta.column(SIGN).to_numpy()[row] > 0)).sum()))
        row, start, end, seen = row[taken], start[taken], end[taken], seen[taken]
        found = delta.drop_columns([NOW, SEEN]).take(row)
        if not self._every and self._size:  # a row that was moved in time may still count where it was
            parts: list[AnyArray] = [found.column(ID), pc.cast(found.column(TIME), pa.string())]
            ids: AnyArray = pc.binary_join_element_wise(*parts, ",")
            found = found.set_column(found.column_names.index(ID), ID, ids)
        found = found.append_column(START, _moments(start)).append_column(END, _moments(end))
        return found.append_column(LATE, pa.array((end <= seen - self._lateness).astype(np.int64)))

    def _windows(self, times: Ints) -> tuple[Ints, Ints, Ints]:
        """For each window of each row: the row's number, the window's start and end."""
        rows = np.arange(len(times))
        if not self._size:
            return rows, np.full(len(times), NEVER), np.full(len(times), _FOREVER)
        if not self._every:
            return rows, times, times
        count = -(-self._size // self._every)
        last = times // self._every * self._every
        start = (last[:, None] - np.arange(count)[::-1] * self._every).ravel()
        row = np.repeat(rows, count)
        inside = start + self._size > times[row]  # a slide above the size leaves gaps
        return row[inside], start[inside], start[inside] + self._size

    def _count(self, more: int) -> None:
        if more:
            count = pa.table({"dropped": pa.array([self.dropped + more])}, _COUNT)
            one = pa.array(["late"])
            self.counts.put(one, one, np.ones(1, np.bool_), count)


def _moments(values: Ints) -> AnyArray:
    """Microseconds as timestamps; null for the ends of all time."""
    bounded = (values > NEVER) & (values < _FOREVER)
    return pa.array(np.where(bounded, values, 0), mask=~bounded).cast(TIMESTAMP)


class Closing:
    """Adds WATERMARK and FINAL to the rows of windows, and decides which are emitted.

    The result has new rows only, and old rows where a window is gone: `Settled` completes it.
    """

    def __init__(self, columns: pa.Schema, emit: Emit, watermark: Callable[[], int]) -> None:
        """`watermark` is the clock less the lateness after the batch; NEVER while the snapshot is read."""
        self._emit, self._watermark = emit, watermark
        self.schema = pa.schema([*columns, (WATERMARK, TIMESTAMP), (FINAL, pa.bool_())])
        self.open = StateTable(pa.schema([(ID, pa.string()), *columns]))
        self.closed = StateTable(_CLOSED)
        self._ends: Ints | None = None

    @property
    def tables(self) -> dict[str, StateTable]:
        """The state."""
        return {"open windows": self.open, "watermark": self.closed}

    def step(self, delta: pa.Table) -> pa.Table:
        """`delta` is net. Also called for a batch without changes: the clock may have moved."""
        before = self.stored_watermark
        watermark = max(self._watermark(), before)
        self._keep_open(delta, _microseconds(delta.column(END)), before)
        new, gone = (delta.filter(pa.array(delta.column(SIGN).to_numpy() == sign)) for sign in (1, -1))
        final = _microseconds(new.column(END)) <= watermark
        shown = np.ones(len(final), np.bool_) if self._emit != "close" else final
        parts = [self._shown(gone, watermark), self._shown(new.filter(pa.array(shown)), watermark)]
        newly = self._close(watermark)
        if self._emit != "change":
            known = pc.is_in(newly.column(ID), value_set=new.column(ID).combine_chunks())
            parts.append(self._shown(newly.filter(pc.invert(known)), watermark))
        self._store_watermark(watermark)
        return pa.concat_tables(parts).combine_chunks()

    def _keep_open(self, delta: pa.Table, ends: Ints, watermark: int) -> None:
        """Remember the rows of windows that were open by this watermark, by their end."""
        still = ends > watermark
        rows, ends = delta.filter(pa.array(still)), ends[still]
        live = rows.column(SIGN).to_numpy() > 0
        self.open.put(_texts(ends), rows.column(ID), live, rows)
        if self._ends is not None:
            self._ends = np.union1d(self._ends, ends[live])

    def _close(self, watermark: int) -> pa.Table:
        """The rows of the windows that close now, which are open no longer."""
        if self._ends is None:
            found = [_microseconds(rows.column(END)) for rows in self.open.scan()]
            self._ends = np.unique(np.concatenate([np.zeros(0, np.int64), *found]))
        due = self._ends[: np.searchsorted(self._ends, watermark, "right")]
        self._ends = self._ends[len(due) :]
        rows = own_columns(self.open.lookup(hashes(_texts(due))))
        rows = rows.filter(pa.array(_microseconds(rows.column(END)) <= watermark))
        keys = _texts(_microseconds(rows.column(END)))
        self.open.put(keys, rows.column(ID), np.zeros(rows.num_rows, np.bool_), rows)
        return rows.append_column(SIGN, pa.array(np.ones(rows.num_rows, np.int8)))

    def _shown(self, rows: pa.Table, watermark: int) -> pa.Table:
        final = pa.array(_microseconds(rows.column(END)) <= watermark)
        moment = _moments(np.full(rows.num_rows, watermark))
        found = rows.append_column(WATERMARK, moment).append_column(FINAL, final)
        return found.select(delta_schema(self.schema).names)

    @property
    def stored_watermark(self) -> int:
        """The watermark after the last batch."""
        return max((rows.column("watermark")[0].as_py() for rows in self.closed.scan()), default=NEVER)

    def _store_watermark(self, watermark: int) -> None:
        if watermark > self.stored_watermark:
            one = pa.array(["watermark"])
            self.closed.put(one, one, np.ones(1, np.bool_), pa.table({"watermark": pa.array([watermark])}, _CLOSED))


class Settled:
    """Makes a net delta of rows that are there now and rows that are gone, by what was emitted before."""

    def __init__(self, emitted: StateTable) -> None:
        self._emitted = emitted

    def step(self, rows: pa.Table) -> pa.Table:
        """The net delta. The last row of an id counts."""
        if not rows.num_rows:
            return rows
        ids = rows.column(ID).combine_chunks()
        names = [name for name in rows.column_names if name not in (ID, SIGN)]
        stored = own_columns(self._emitted.lookup(hashes(ids)))
        stored = stored.filter(pc.is_in(stored.column(ID), value_set=ids))
        old = signed(stored.select([ID, *names]), np.full(stored.num_rows, -1, np.int8))
        alive = rows.filter(pc.greater(rows.column(SIGN), pa.scalar(0)))
        return net(pa.concat_tables([old, alive]).combine_chunks())


def _microseconds(column: AnyArray) -> Ints:
    """Ends of windows as numbers; that of all time comes last."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    numbers: Ints = array.cast(pa.int64()).fill_null(_FOREVER).to_numpy(zero_copy_only=False)
    return numbers


def _texts(values: Ints) -> AnyArray:
    return pa.array(values, pa.int64()).cast(pa.string())

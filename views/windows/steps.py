"""The steps that compute windows."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from cdc.expressions.program import Program, compile_program
from views.dataflow.aggregate import GROUP, Call, GroupedRows, RunningTotals, Total
from views.dataflow.events import NOW, SEEN, TIME, Events
from views.dataflow.graph import Care, Graph, GraphBuilder
from views.dataflow.output import Output
from views.dataflow.rekey import Rekeyed
from views.dataflow.time_groups import Sessions, Sliding
from views.dataflow.typed import KEY, Computed, Keyed, ReadValues, Shown
from views.dataflow.windows import END, FINAL, LATE, START, WATERMARK, Assigned, Closing, Settled
from views.query.aggregates import sum_digits
from views.query.compiled import arrow_schema, calls_of, conjunction, identity
from views.query.grouping import grouping_of
from views.query.key import ONLY_ROW
from views.time.clock import NEVER
from views.windows.settings import WindowSettings
from views.windows.source import WindowSource

_BOUNDS = {START: "TIMESTAMPTZ", END: "TIMESTAMPTZ"}
_LATE_CALL = Call(LATE, pa.int64(), f'cast(sum("{LATE}") as bigint)', f'cast("s_{LATE}" as bigint)')


class WindowSteps:
    """The steps of one view of windows, built once: `types` are the columns of the result."""

    def __init__(self, source: WindowSource) -> None:
        self._source, self._settings = source, source.settings
        self._grouping = grouping_of(source.statement)
        (columns,) = source.columns.values()
        self._events = Events(self._settings.source, columns, source.event_times(), self._settings.idle)
        self._steps = GraphBuilder([self._events])
        self._output = Output(self._settings.table)
        types, schema = self._groups(*self._windows())
        self.types = self._result(types, schema)

    def graph(self) -> Graph:
        """The graph."""
        return self._steps.built(self._output, Care(self._forget, self._facts))

    def _facts(self) -> dict[str, object]:
        """The watermark, and how many changes came after their window had closed for good."""
        reached = self._closing.stored_watermark
        since = datetime(1970, 1, 1, tzinfo=UTC)
        shown = (since + timedelta(microseconds=reached)).isoformat() if reached > NEVER // 2 else ""
        return {"watermark": shown, "late_dropped": self._assigned.dropped}

    @property
    def _grace(self) -> int:
        """How long after its close a window is still corrected."""
        return self._settings.correct_for if self._settings.late == "correct" else 0

    def _forget(self) -> None:
        """Remove what windows had that are closed for good: no change is taken for them any more."""
        closed = self._closing.stored_watermark - self._grace
        reach = 0 if self._by_rows else _size(self._settings.window)[0]
        if self._settings.window.all or closed <= NEVER // 2:
            return
        self._events.state.forget(lambda rows: rows.column(TIME).to_numpy() + reach <= closed)
        self._aggregates.forget(closed)

    def _windows(self) -> tuple[int, dict[str, str]]:
        """The events with the arguments of the aggregates, once for each of their windows."""
        source, settings = self._source, self._settings
        cells = tuple((name.partition(".")[2], name, type_) for name, type_ in source.types.items())
        read = ReadValues(cells, settings.name, (TIME, SEEN, NOW))
        at = self._steps.add("values", read.step, [0], f"reads {settings.source} in the order of the log")
        program = self._arguments()
        text = f"keeps rows where {settings.where}" if settings.where else ""
        at = self._steps.add("arguments", Computed(program).step, [at], text)
        self._assigned = assigned = Assigned(*_size(settings.window), settings.lateness, self._grace)
        text = f"{_form(settings.window)}; a window closes {settings.lateness / 1e6:g} s after its end, in event time"
        return self._steps.add("windows", assigned.step, [at], text, assigned.tables), {**program.types, **_BOUNDS}

    def _arguments(self) -> Program:
        source = self._source
        select = {**self._grouping.arguments, **{name: identity(name) for name in source.event_key}}
        return compile_program(select, conjunction(source.statement.where, source.statement), source.types)

    def _groups(self, at: int, types: Mapping[str, str]) -> tuple[dict[str, str], pa.Schema]:
        """The aggregates of each window and group."""
        bounds = () if self._by_rows or self._settings.window.all else ((START, _BOUNDS[START]),)
        parts = (*bounds, *((name, types[name]) for name in self._grouping.key))
        at = self._steps.add("keys", Keyed(GROUP, parts, nulls=True).step, [at])
        calls, computed = calls_of(self._grouping, types, self._source.statement)
        self._aggregates = step = self._aggregate([*calls, _LATE_CALL], types)
        kept = (
            "counts and sums, changed in place"
            if isinstance(step, RunningTotals)
            else "a changed group is computed anew"
        )
        self._at = self._steps.add("groups", step.step, [at], kept, step.tables)
        own = {name: types[name] for name in (*self._grouping.key, *self._source.event_key)}
        return {**_BOUNDS, **own, **computed, LATE: "BIGINT"}, step.schema

    @property
    def _by_rows(self) -> bool:
        """Whether the windows depend on the rows."""
        return self._settings.window.session is not None or self._settings.window.sliding is not None

    def _aggregate(self, calls: list[Call], types: Mapping[str, str]) -> RunningTotals | GroupedRows:
        name, window = self._settings.name, self._settings.window
        columns = [each for each in self._grouping.arguments if each not in self._grouping.key]
        arguments = pa.schema([*arrow_schema(columns, types), (LATE, pa.int64())])
        own = arrow_schema([*self._grouping.key, *self._source.event_key], types)
        if window.session is not None:
            return Sessions(own, calls, arguments, name, window.session)
        if window.sliding is not None:
            return Sliding(own, calls, arguments, name, window.sliding)
        keys = pa.schema([*arrow_schema(_BOUNDS, _BOUNDS), *own])
        if all(call.totals_sql for call in calls):
            totals = [*(Total(each, sum_digits(types[each])) for each in columns), Total(LATE, 0)]
            return RunningTotals(keys, calls, totals, name)
        return GroupedRows(keys, calls, arguments, name)

    def _result(self, types: Mapping[str, str], schema: pa.Schema) -> dict[str, str]:
        """The columns of the result, emitted when they are due."""
        settings, key = self._settings, self._source.key
        self._closing = closing = Closing(schema, settings.emit, self._watermark)
        at = self._steps.add("closing", closing.step, [self._at], _EMITTED[settings.emit], closing.tables)
        program = self._columns({**types, WATERMARK: "TIMESTAMPTZ", FINAL: "BOOLEAN"})
        at = self._steps.add("result", Computed(program).step, [at], "the columns of the result")
        shown = Shown(tuple(program.types.items()), key, () if key else ((ONLY_ROW, "1"),))
        at = self._steps.add("rows", shown.step, [at])
        at = self._steps.add(settings.name, Rekeyed(KEY, settings.name).step, [at], f"one row per {', '.join(key)}")
        self._steps.add("settled", Settled(self._output.rows).step, [at])
        return dict(program.types)

    def _columns(self, types: Mapping[str, str]) -> Program:
        bounds = [] if self._settings.window.all else [START, END]
        first = {name: identity(name) for name in bounds}
        key = {name.partition(".")[2]: identity(name) for name in self._source.event_key}
        last = {name: identity(name) for name in (LATE, FINAL, WATERMARK)}
        return compile_program({**first, **key, **self._grouping.items, **last}, None, types)

    def _watermark(self) -> int:
        """The clock less the lateness; NEVER while the snapshot is read."""
        if self._events.loading or self._events.greatest == NEVER:
            return NEVER
        return self._events.greatest - self._settings.lateness


_EMITTED = {
    "change": "emits a window's row at every change",
    "close": "emits a window's row once it has closed",
    "both": "emits a window's row at every change, and when it closes",
}


def _size(window: WindowSettings) -> tuple[int, int]:
    """Size and distance of windows; see `Assigned`."""
    if window.all:
        return 0, 0
    if window.session is not None or window.sliding is not None:
        return int(window.session or window.sliding or 0), 0
    return int(window.tumbling or window.hopping or 0), int(window.every or window.tumbling or 0)


def _form(window: WindowSettings) -> str:
    for name in ("tumbling", "hopping", "sliding", "session"):
        size = getattr(window, name)
        if size is not None:
            every = f" every {window.every / 1e6:g} s" if window.every else ""
            return f"{name} windows of {size / 1e6:g} s{every}"
    return "one window"

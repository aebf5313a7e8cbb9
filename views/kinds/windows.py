"""Windows: aggregates of a table's rows by event time, which stay right when rows come late or are corrected."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator
from sqlglot import exp

from cdc.arrays import AnyArray
from cdc.config.settings import Section, TableField, ViewSettings
from cdc.errors import ConfigError
from cdc.expressions.column_types import column_of
from cdc.expressions.expression import Expression
from cdc.expressions.program import Program, compile_program
from cdc.expressions.values import arrow_type, typed_cells
from cdc.model import Column, TableSchema
from views.catalog import Catalog
from views.dataflow.aggregate import GROUP, Call, GroupedRows, RunningTotals, Total
from views.dataflow.events import NOW, SEEN, TIME, Events
from views.dataflow.graph import Graph, Node, Step
from views.dataflow.output import Output
from views.dataflow.rekey import Rekeyed
from views.dataflow.time_groups import Sessions, Sliding
from views.dataflow.typed import KEY, ONE, Computed, Keyed, Shown, Typed
from views.dataflow.windows import END, FINAL, LATE, START, WATERMARK, Assigned, Closing, Emit, Settled
from views.plan import Plan
from views.query.aggregates import reduced, sum_digits
from views.query.compiled import conjunction, grouping_of, identity, needed_columns
from views.query.statement import Statement, read_statement
from views.time.clock import NEVER
from views.time.duration import Duration


class WindowSettings(Section):
    """The form of the windows; name exactly one of them. `every` belongs to `hopping`."""

    tumbling: Duration | None = None
    """Windows of this size, one after the other."""
    hopping: Duration | None = None
    """Windows of this size, of which one begins every `every`. They overlap, or leave gaps if `every` is larger."""
    every: Duration | None = None
    """The distance between the beginnings of hopping windows."""
    sliding: Duration | None = None
    """For each row, the rows of the time of this size before it."""
    session: Duration | None = None
    """Rows that follow each other by less than this gap."""
    all: bool = False
    """One window for all time."""

    @model_validator(mode="after")
    def _one_form(self) -> "WindowSettings":
        named = [name for name in ("tumbling", "hopping", "sliding", "session") if getattr(self, name) is not None]
        if len(named) + self.all != 1:
            raise ValueError("name one of tumbling, hopping, sliding, session and all")
        if (self.hopping is None) != (self.every is None):
            raise ValueError("`every` goes with `hopping`, which needs it")
        if any(getattr(self, name) == 0 for name in (*named, *(["every"] if self.every is not None else []))):
            raise ValueError("a window must be longer than nothing")
        return self


class WindowedSettings(ViewSettings):
    """Aggregates of one table's rows by windows of event time."""

    kind: Literal["windows"] = "windows"
    source: TableField
    """The table whose rows are events, as schema.name."""
    where: str = ""
    """Only rows that meet this condition."""
    time: str = ""
    """The event time: a column or an expression of type timestamptz or timestamp. Empty: the time of the commit."""
    lateness: Duration = 0
    """How far behind the greatest event time a row may come and still be in time."""
    late: Literal["correct", "drop"] = "correct"
    """A row that comes after its window has closed: the window's row is corrected, or the row is dropped and counted."""
    correct_for: Duration = Field(86_400_000_000, validate_default=False)
    """How long after its close a window is still corrected; later rows are dropped and counted."""
    idle: Duration = 0
    """While no row comes for so long, time passes by the clock of the capture process. 0: it stands still."""
    window: WindowSettings
    """The form of the windows."""
    group_by: dict[str, str] = Field(default_factory=dict)
    """Columns of the result by which rows are grouped: names and expressions."""
    compute: dict[str, str]
    """Columns of the result that are computed: names and aggregates."""
    emit: Emit = "change"
    """When the row of a window is emitted: at every change, once when it closes (and when it is corrected), or both."""
    tick_seconds: float = Field(0.0, ge=0)
    """How often the log gets the time while `idle` is set; 0: every second."""

    @model_validator(mode="after")
    def _ticks(self) -> "WindowedSettings":
        if self.idle and not self.tick_seconds:
            object.__setattr__(self, "tick_seconds", 1.0)
        return self


SETTINGS = WindowedSettings


def plan(settings: WindowedSettings, catalog: Catalog) -> Plan:
    """The plan of windows. Raises ConfigError, which names the view and the place."""
    view = _View.of(settings, catalog)
    shown = _result_types(view)
    own = tuple(_column(name, type_, name in view.key) for name, type_ in shown.items())
    own = own if view.key else (ONE, *own)
    definition = hashlib.sha256(f"{settings.model_dump_json()}|{shown}".encode()).hexdigest()[:16]
    columns = {settings.source: view.columns}
    return Plan(settings.name, columns, TableSchema(settings.table, own), partial(_graph, view), None, definition)


def _column(name: str, type_: str, key: bool) -> Column:
    found = column_of(name, type_)
    return Column(name, found.type, found.modifier, key)


@dataclass(frozen=True, slots=True)
class _View:
    """The settings with everything resolved."""

    settings: WindowedSettings
    statement: Statement
    time: Expression | None
    columns: tuple[str, ...]
    event_key: tuple[str, ...]
    """The key of a row of the source."""

    @classmethod
    def of(cls, settings: WindowedSettings, catalog: Catalog) -> "_View":
        place = f"view {settings.name}"
        reserved = {START, END, LATE, FINAL, WATERMARK}
        for name in (*settings.group_by, *settings.compute):
            if name in reserved or name in set(settings.group_by) & set(settings.compute):
                raise ConfigError(f"{place}: a column cannot be called {name} here.", "Give it another name.")
        items = {**settings.group_by, **settings.compute, **({"_time": settings.time} if settings.time else {})}
        select = ", ".join(f"{text} as {_quoted(name)}" for name, text in items.items())
        table = f"{_quoted(settings.source.schema)}.{_quoted(settings.source.name)}"
        where = f" where {settings.where}" if settings.where else ""
        group = ", ".join(str(number) for number in range(1, len(settings.group_by) + 1))
        text = f"select {select} from {table}{where}{f' group by {group}' if group else ''}"
        statement = read_statement(text, catalog, place)
        time = next((item.expression for item in statement.items if item.name == "_time"), None)
        items_without = tuple(item for item in statement.items if item.name != "_time")
        statement = Statement(text, place, statement.inputs, (), statement.where, items_without, statement.group, None)
        if not statement.grouped:
            raise ConfigError(f"{place}: `compute` has no aggregate.", "For instance: compute: {orders: count(*)}")
        needed = needed_columns(statement) | set(time.columns if time else ())
        event_key = statement.inputs[0].key if settings.window.sliding is not None else ()
        names = {name.partition(".")[2] for name in (*needed, *event_key)}
        return cls(settings, statement, time, tuple(sorted(names)), event_key)

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row of the result."""
        if self.settings.window.sliding is not None:
            return (END, *(name.partition(".")[2] for name in self.event_key))
        bounds = () if self.settings.window.all else (START,)
        return (*bounds, *self.settings.group_by)

    @property
    def types(self) -> dict[str, str]:
        """The types of the source's columns that are used."""
        every = self.statement.inputs[0].types
        return {name: type_ for name, type_ in every.items() if name.partition(".")[2] in self.columns}


def _result_types(view: _View) -> dict[str, str]:
    shown = _Built(view)
    return shown.shown


class _Built:
    """The steps of one view of windows."""

    def __init__(self, view: _View) -> None:
        self.view, settings = view, view.settings
        self.events = Events(settings.source, view.columns, _time_of(view), settings.idle)
        self.nodes: list[Node] = []
        self.output = Output(settings.table)
        self.grouping = grouping_of(view.statement)
        self.shown = self._build()

    def _add(self, name: str, step: Step, text: str) -> None:
        self.nodes.append(Node(name, step, (len(self.nodes),), text))

    def _build(self) -> dict[str, str]:
        view, settings = self.view, self.view.settings
        cells = tuple((name.partition(".")[2], name, type_) for name, type_ in view.types.items())
        passed = (TIME, SEEN, NOW)
        self._add("values", Typed(cells, settings.name, passed), f"reads {settings.source} in the order of the log")
        program = self._arguments()
        self._add("arguments", Computed(program), settings.where and f"keeps rows where {settings.where}")
        window = settings.window
        grace = settings.correct_for if settings.late == "correct" else 0
        assigned = Assigned(*_size(window), settings.lateness, grace)
        self._add("windows", assigned, f"{_form(window)}; the clock lags {settings.lateness / 1e6:g} s")
        types = {**program.types, START: "TIMESTAMPTZ", END: "TIMESTAMPTZ"}
        by_rows = window.session is not None or window.sliding is not None
        bounds = () if by_rows or window.all else ((START, "TIMESTAMPTZ"),)
        parts = (*bounds, *((name, types[name]) for name in self.grouping.key))
        self._add("keys", Keyed(GROUP, parts, nulls=True), "")
        step, result = self._aggregate(types)
        self._add(
            "groups",
            step,
            "counts and sums, changed in place" if isinstance(step, RunningTotals) else "rows of each group",
        )
        return self._finish(step.schema, result)

    def _arguments(self) -> Program:
        view = self.view
        keys = {name: identity(name) for name in view.event_key}
        return compile_program(
            {**self.grouping.arguments, **keys}, conjunction(view.statement.where, view.statement), view.types
        )

    def _aggregate(self, types: Mapping[str, str]) -> tuple[RunningTotals | GroupedRows, dict[str, str]]:
        view, window, calls, totals = self.view, self.view.settings.window, [], True
        result = {START: "TIMESTAMPTZ", END: "TIMESTAMPTZ", **{name: types[name] for name in self.grouping.key}}
        for name, call, columns in self.grouping.calls:
            whole = Expression(view.statement.text, view.statement.place, (), call.node)
            how = reduced(call, columns, [types[each] for each in columns], partial(_error, whole, call.node))
            calls.append(Call(name, arrow_type(how.type), how.rows_sql, how.totals_sql))
            result[name], totals = how.type, totals and bool(how.totals_sql)
        calls.append(Call(LATE, pa.int64(), f'cast(sum("{LATE}") as bigint)', f'cast("s_{LATE}" as bigint)'))
        result[LATE] = "BIGINT"
        columns = [name for name in types if name.startswith("x")]
        arguments = pa.schema([*((name, arrow_type(types[name])) for name in columns), (LATE, pa.int64())])
        own = pa.schema([(name, arrow_type(types[name])) for name in (*self.grouping.key, *view.event_key)])
        for name in view.event_key:
            result[name] = types[name]
        if window.session is not None:
            return Sessions(own, calls, arguments, view.settings.name, window.session), result
        if window.sliding is not None:
            return Sliding(own, calls, arguments, view.settings.name, window.sliding), result
        keys = pa.schema([(START, arrow_type("TIMESTAMPTZ")), (END, arrow_type("TIMESTAMPTZ")), *own])
        if totals:
            summed = [*(Total(name, sum_digits(types[name])) for name in columns), Total(LATE, 0)]
            return RunningTotals(keys, calls, summed, view.settings.name), result
        return GroupedRows(keys, calls, arguments, view.settings.name), result

    def _finish(self, schema: pa.Schema, types: dict[str, str]) -> dict[str, str]:
        view, settings = self.view, self.view.settings
        closing = Closing(schema, settings.emit, self._watermark)
        self._add("closing", closing, f"emits on {settings.emit}")
        types = {**types, WATERMARK: "TIMESTAMPTZ", FINAL: "BOOLEAN"}
        bounds = [] if settings.window.all else [START, END]
        more = {name: identity(name) for name in (*bounds, LATE, FINAL, WATERMARK)}
        keys = {name.partition(".")[2]: identity(name) for name in view.event_key}
        first = {name: more[name] for name in bounds}
        program = compile_program({**first, **keys, **self.grouping.items, **more}, None, types)
        self._add("result", Computed(program), "the columns of the result")
        shown = dict(program.types)
        self._add("rows", Shown(tuple(shown.items()), view.key, () if view.key else ((ONE.name, "1"),)), "")
        self._add(settings.name, Rekeyed(KEY, settings.name), f"one row per {', '.join(view.key)}")
        self._add("settled", Settled(self.output.rows), "")
        return shown

    def _watermark(self) -> int:
        """The clock less the lateness; NEVER while the snapshot is read."""
        if self.events.loading or self.events.greatest == NEVER:
            return NEVER
        return self.events.greatest - self.view.settings.lateness


def _graph(view: _View) -> Graph:
    built = _Built(view)
    return Graph([built.events], built.nodes, built.output)


def _time_of(view: _View) -> Callable[[pa.Table], AnyArray] | None:
    """Computes event times from cells."""
    if view.time is None:
        return None
    types = {name: type_ for name, type_ in view.types.items() if name in view.time.columns}
    program = compile_program({TIME: view.time}, None, types)
    if program.types[TIME] not in ("TIMESTAMPTZ", "TIMESTAMP", "DATE"):
        raise view.time.error(
            f"the event time is {program.types[TIME].lower()}, not timestamptz.",
            "Cast it, for instance: at::timestamptz",
        )

    def times(cells: pa.Table) -> AnyArray:
        values = {name: typed_cells(cells.column(name.partition(".")[2]), type_) for name, type_ in types.items()}
        found = program.run(pa.table(values)).column(TIME)
        return pc.cast(pc.cast(found, pa.timestamp("us")), pa.int64())

    return times


def _size(window: WindowSettings) -> tuple[int, int]:
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


def _error(whole: Expression, node: exp.Expr, message: str, remedy: str) -> ConfigError:
    return whole.error(message, remedy, node)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

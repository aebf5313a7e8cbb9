"""What windows compute, resolved against the captured table: the groups, the aggregates, the event time."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.errors import ConfigError
from cdc.expressions.engine import quoted
from cdc.expressions.expression import Expression
from cdc.expressions.program import compile_program
from cdc.expressions.values import typed_cells
from cdc.model import TableId
from views.catalog import Catalog
from views.dataflow.events import TIME
from views.dataflow.windows import END, FINAL, LATE, START, WATERMARK
from views.query.compiled import needed_columns
from views.query.statement import Statement, read_statement
from views.windows.settings import WindowedSettings

_TIMES = ("TIMESTAMPTZ", "TIMESTAMP", "DATE")
_TIME_ITEM = "event time"


@dataclass(frozen=True, slots=True)
class WindowSource:
    """The table of the events, and what is computed of its rows. `statement` has no windows: they are added to its
    groups."""

    settings: WindowedSettings
    statement: Statement
    time: Expression | None
    """None: the time of the commit."""
    event_key: tuple[str, ...]
    """The qualified names of the key of a row of the table, if the result has a row for each."""

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row of the result; none: there is a single row."""
        window = self.settings.window
        if window.sliding is not None:
            return (END, *(name.partition(".")[2] for name in self.event_key))
        return (*(() if window.all else (START,)), *self.settings.group_by)

    @property
    def types(self) -> dict[str, str]:
        """The types of the table's columns that are used, by qualified name."""
        used = needed_columns(self.statement) | set(self.time.columns if self.time else ()) | set(self.event_key)
        return {name: type_ for name, type_ in self.statement.types.items() if name in used}

    @property
    def columns(self) -> dict[TableId, tuple[str, ...]]:
        """The columns that are needed of the table."""
        return {self.settings.source: tuple(sorted(name.partition(".")[2] for name in self.types))}

    def event_times(self) -> Callable[[pa.Table], AnyArray] | None:
        """Computes event times in microseconds from rows of cells; None: the time of the commit."""
        if self.time is None:
            return None
        types = {name: type_ for name, type_ in self.types.items() if name in self.time.columns}
        program = compile_program({TIME: self.time}, None, types)
        if program.types[TIME] not in _TIMES:
            raise self.time.error(
                f"the event time is {program.types[TIME].lower()}, not timestamptz.", "Cast it: at::timestamptz"
            )

        def times(cells: pa.Table) -> AnyArray:
            values: dict[str, AnyArray] = {}
            for name, type_ in types.items():
                values[name] = typed_cells(cells.column(name.partition(".")[2]), type_)
            found: AnyArray = program.run(pa.table(values)).column(TIME).combine_chunks()
            return pc.cast(pc.cast(found, pa.timestamp("us")), pa.int64())

        return times


def read_source(settings: WindowedSettings, catalog: Catalog) -> WindowSource:
    """Resolve the settings. Raises ConfigError, which names the view and the place."""
    place = f"view {settings.name}"
    _check_names(settings, place)
    statement = read_statement(_statement(settings), catalog, place)
    time = next((item.expression for item in statement.items if item.name == _TIME_ITEM), None)
    items = tuple(item for item in statement.items if item.name != _TIME_ITEM)
    statement = replace(statement, items=items)
    if not statement.grouped:
        raise ConfigError(f"{place}: `compute` has no aggregate.", "For instance: compute: {orders: count(*)}")
    event_key = statement.inputs[0].key if settings.window.sliding is not None else ()
    source = WindowSource(settings, statement, time, event_key)
    source.event_times()
    return source


def _check_names(settings: WindowedSettings, place: str) -> None:
    reserved = {START, END, LATE, FINAL, WATERMARK} | (set(settings.group_by) & set(settings.compute))
    for name in (*settings.group_by, *settings.compute):
        if name in reserved:
            raise ConfigError(f"{place}: a column cannot be called {name} here.", "Give it another name.")


def _statement(settings: WindowedSettings) -> str:
    """The settings as a SELECT, so that the same code resolves both."""
    items = {**settings.group_by, **settings.compute, **({_TIME_ITEM: settings.time} if settings.time else {})}
    select = ", ".join(f"{text} as {quoted(name)}" for name, text in items.items())
    table = f"{quoted(settings.source.schema)}.{quoted(settings.source.name)}"
    where = f" where {settings.where}" if settings.where else ""
    group = ", ".join(str(number) for number in range(1, len(settings.group_by) + 1))
    return f"select {select} from {table}{where}{f' group by {group}' if group else ''}"  # noqa: S608  parsed, not run

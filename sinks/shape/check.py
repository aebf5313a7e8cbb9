"""Checks of the shapes in a pipeline file against known schemas, for `validate` and `doctor`. Connects to nothing."""

from collections.abc import Iterable, Iterator, Mapping

from cdc.capture.source.doctor import Finding, Verdict
from cdc.config.settings import Settings, SinkSettings
from cdc.errors import ConfigError
from cdc.model import TableId, TableSchema
from sinks.shape.columns import shaped_columns

CHECK = "shape"
_SAME_FIELD = {"varchar": "text", "citext": "text"}


def examine(settings: Settings, schemas: Iterable[TableSchema]) -> list[Finding]:
    """One finding for each shaped table with a known schema, and for each type that tables of one target disagree
    about."""
    known = {schema.table: schema for schema in schemas}
    return [finding for sink in settings.sinks if sink.shape for finding in _of_sink(sink, known)]


def _of_sink(sink: SinkSettings, known: Mapping[TableId, TableSchema]) -> Iterator[Finding]:
    stored: dict[TableId, TableSchema] = {}
    for table, shape in sink.shape.items():
        if table not in known:
            continue
        about = f"{sink.name}: {table}"
        try:
            stored[table] = shaped_columns(shape, known[table], sink.name).schema
        except ConfigError as error:
            yield Finding(CHECK, Verdict.FAIL, about, error.message, error.remedy)
        else:
            columns = ", ".join(column.name for column in stored[table].columns)
            yield Finding(CHECK, Verdict.OK, about, f"stored as {columns}")
    for table, schema in stored.items():
        for other in sink.sharing(table):
            if other in stored and other < table:
                yield from _disagreements(sink, stored[other], schema)


def _disagreements(sink: SinkSettings, first: TableSchema, second: TableSchema) -> Iterator[Finding]:
    """Columns of one name and different types: an index has one field for both."""
    types = {column.name: column.type.name for column in first.columns}
    for column in second.columns:
        one, other = types.get(column.name, column.type.name), column.type.name
        if _SAME_FIELD.get(one, one) != _SAME_FIELD.get(other, other):
            message = f"column {column.name} is {other} here and {one} in {first.table}, in one target"
            remedy = f"Cast or rename it in the shape of one, for instance cast: {{{column.name}: {one}}}."
            yield Finding(CHECK, Verdict.FAIL, f"{sink.name}: {second.table}", message, remedy)

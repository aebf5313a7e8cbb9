"""The columns of a DataFrame: those of the table, in the types of the Delta sink, then what describes the change. Pure.

The types are taken from `sinks.delta` on purpose: a column has one Spark type, whether it is read from the lake or from
the log.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from cdc.errors import ConfigError
from cdc.model import Column, TableSchema
from sinks.delta.rows.images import type_name
from sinks.delta.schema.types import INSTANT, arrow_type

CHANGE_TYPE = "_change_type"
COMMIT_VERSION = "_commit_version"
COMMIT_TIMESTAMP = "_commit_timestamp"
ROW_VERSION = "_row_version"
ORDINAL = "_ordinal"
MISSING = "_missing"
_FIELDS: dict[str, pa.DataType] = {
    CHANGE_TYPE: pa.string(),
    COMMIT_VERSION: pa.int64(),
    COMMIT_TIMESTAMP: INSTANT,
    ROW_VERSION: pa.int64(),
    ORDINAL: pa.int64(),
    MISSING: pa.list_(pa.string()),
}
OURS = pa.schema(_FIELDS)
"""The first three are those of Spark's CHANGES and of Delta's change data feed. None is NULL, but none is declared
NOT NULL: a Delta table made from them would demand it of every later writer."""


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of a table that a query reads, as they were when it started."""

    schema: TableSchema
    read: tuple[Column, ...]
    types: Mapping[Column, pa.DataType]

    @property
    def spark(self) -> StructType:
        """The schema of the DataFrame."""
        own = [pa.field(column.name, self.types[column]) for column in self.read]
        return from_arrow_schema(pa.schema([*own, *OURS]))

    @property
    def arrow(self) -> pa.Schema:
        """The schema of the record batches, exactly as Spark wants them."""
        return to_arrow_schema(self.spark, timezone="UTC")

    def change_in(self, later: TableSchema) -> str:
        """What a query with these columns would get wrong in rows of a later schema; empty if nothing."""
        known = {column.name: column for column in self.schema.columns}
        chosen = set(self.read)
        all_read = len(chosen) == len(known)
        for column in later.columns:
            old = known.get(column.name)
            if old is None and all_read:
                return f"column {column.name} was added"
            if old in chosen and old is not None and arrow_type(column) != self.types[old]:
                return f"column {column.name} is {type_name(arrow_type(column))} now, not {type_name(self.types[old])}"
        return ""


def table_columns(schema: TableSchema, names: Sequence[str] = ()) -> TableColumns:
    """All columns of a table, or the named ones in that order. Raises ConfigError, which names the column."""
    by_name = {column.name: column for column in schema.columns}
    for name in names:
        if name not in by_name:
            known = ", ".join(by_name)
            raise ConfigError(f"Option 'columns': table {schema.table} has no column {name!r}.", f"It has: {known}.")
    read = tuple(by_name[name] for name in dict.fromkeys(names)) or schema.columns
    _require_distinct(schema, read)
    return TableColumns(schema, read, {column: arrow_type(column) for column in read})


def _require_distinct(schema: TableSchema, read: Sequence[Column]) -> None:
    """Spark does not tell names apart that differ in case only."""
    counts = Counter(name.lower() for name in (*(column.name for column in read), *OURS.names))
    for column in read:
        if counts[column.name.lower()] > 1:
            raise ConfigError(
                f"Column {column.name!r} of table {schema.table} has the name of another column of the DataFrame.",
                "Leave it out: name the other columns in the option 'columns'.",
            )

"""Reads single rows from the source again, for a partial change whose row is missing in a store.

The row has the same encoding as in the stream. It may be newer than the change that needs it; it is applied with that
change's version, and the newer changes follow.
"""

from collections.abc import Mapping, Sequence

from psycopg import sql

from cdc.capture.source.connect import connect
from cdc.config.settings import SourceSettings
from cdc.errors import SourceRefused
from cdc.json_text.members import members, unquote
from cdc.model import Column, TableSchema
from sinks.rows.images import columns
from snapshots.tables.rows import describe, masking_of, read_images

_KEYS_PER_QUERY = 500


class SourceRows:
    """See sinks.apply.applier.Reselect. Connects for each call: calls are rare."""

    def __init__(self, source: SourceSettings) -> None:
        self._source = source
        self._tables = {table.name: table for table in source.tables}

    def follow(self, source: SourceSettings) -> None:
        """Use the tables of reloaded settings."""
        self._tables = {table.name: table for table in source.tables}

    def __call__(self, schema: TableSchema, keys: Sequence[str]) -> Mapping[str, str]:
        table = self._tables.get(schema.table)
        if table is None:
            raise SourceRefused(f"{schema.table} is not in source.tables.", "Its rows cannot be read again.")
        if hidden := sorted({column.name for column in schema.key} & set(table.mask)):
            raise SourceRefused(
                f"The key of {schema.table} is masked ({', '.join(hidden)}).", "Its rows cannot be looked up by key."
            )
        found: dict[str, str] = {}
        with connect(self._source) as connection:
            readable = describe(connection, table, masking_of(self._source))
            relation = sql.Identifier(schema.table.schema, schema.table.name)
            for start in range(0, len(keys), _KEYS_PER_QUERY):
                wanted = sql.SQL("({})").format(
                    sql.SQL(" or ").join(_condition(schema, key) for key in keys[start : start + _KEYS_PER_QUERY])
                )
                for read in read_images(connection, readable, readable.copy_query(relation, wanted)):
                    found.update(zip(*columns(read, "key", "after"), strict=True))
        return found


def _condition(schema: TableSchema, key: str) -> sql.Composable:
    values = members(key)
    parts = [_equals(column, values[column.name]) for column in schema.key if column.name in values]
    return sql.SQL("({})").format(sql.SQL(" and ").join(parts))


def _equals(column: Column, raw: str) -> sql.Composable:
    """An untyped literal gets the column's type, so the index is used."""
    name = sql.Identifier(column.name)
    if raw == "null":
        return sql.SQL("{} is null").format(name)
    form = "{} = decode({}, 'base64')" if column.type.name == "bytea" else "{} = {}"
    return sql.SQL(form).format(name, sql.Literal(unquote(raw)))

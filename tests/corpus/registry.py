"""A registry of schemas in memory, for decoders under test."""

from collections.abc import Sequence
from dataclasses import replace

from cdc.errors import LogCorrupt
from cdc.model import PgType, TableId, TableSchema, TypeKind


class Registry:
    """Keeps every schema of every table, as `cdc.ports.Schemas` promises."""

    def __init__(self) -> None:
        self._schemas: dict[TableId, list[TableSchema]] = {}

    def record(self, schema: TableSchema) -> TableSchema:
        known = self._schemas.setdefault(schema.table, [])
        if not known or replace(known[-1], id=0) != replace(schema, id=0):
            known.append(replace(schema, id=len(known) + 1))
        return known[-1]

    def get(self, table: TableId, schema_id: int) -> TableSchema:
        for schema in self._schemas.get(table, ()):
            if schema.id == schema_id:
                return schema
        raise LogCorrupt(f"Schema {schema_id} of {table} is unknown")

    def newest(self) -> Sequence[TableSchema]:
        return [known[-1] for _, known in sorted(self._schemas.items())]


def enum_of(oid: int) -> PgType:
    """A catalog in which every foreign type is an enum."""
    return PgType(oid, f"type_{oid}", TypeKind.ENUM)

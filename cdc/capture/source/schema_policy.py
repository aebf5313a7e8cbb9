"""The schema policy: which changes of a table's columns are accepted, checked when a schema is recorded.

Stream, snapshots and backfills all record schemas through it, so they accept and refuse the same changes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from cdc.errors import SchemaRefused
from cdc.model import Column, TableId, TableSchema
from cdc.ports import Schemas

Policy = Literal["evolve", "lenient", "ignore", "exception"]

_WIDER = {
    "int2": {"int4", "int8", "numeric"},
    "int4": {"int8", "numeric"},
    "int8": {"numeric"},
    "float4": {"float8"},
    "bpchar": {"varchar"},
}
"""Types that can represent every value of the former one. Text can represent all."""


class CheckedSchemas:
    """A schema registry that refuses what the policy forbids."""

    def __init__(self, schemas: Schemas, policy: Policy) -> None:
        self._schemas = schemas
        self.policy = policy
        self._newest = {schema.table: schema for schema in schemas.newest()}

    def record(self, schema: TableSchema) -> TableSchema:
        """Record it, or keep the former one (policy `ignore`). Raises SchemaRefused; durable on return."""
        before = self._newest.get(schema.table)
        if before is not None and self._keeps(before, schema):
            if before.oid == schema.oid:
                return before
            schema = replace(before, oid=schema.oid)  # recreated table: the former columns with the new oid
        if (refused := self.refusal(schema)) is not None:
            raise refused
        recorded = self._newest[schema.table] = self._schemas.record(schema)
        return recorded

    def refusal(self, schema: TableSchema, before: TableSchema | None = None) -> SchemaRefused | None:
        """What `record` would raise after `before`, or after the newest schema. Records nothing."""
        before = before or self._newest.get(schema.table)
        if before is None or self.policy == "evolve" or self._keeps(before, schema):
            return None
        found = _changes(before, schema)
        refused = [what for what, harmless in found if self.policy == "exception" or not harmless]
        if not refused:
            return None
        return SchemaRefused(
            f"{schema.table} changed: {'; '.join(refused)}. The policy `{self.policy}` forbids it.",
            "Undo the change, or accept it with source.schema_policy: evolve",
        )

    def already_recorded(self, schema: TableSchema) -> TableSchema | None:
        """What `record` would return without storing anything; None: it would store or refuse the schema."""
        before = self._newest.get(schema.table)
        if before is None or replace(schema, id=before.id) == before:
            return before
        return before if self._keeps(before, schema) else None

    def _keeps(self, before: TableSchema, schema: TableSchema) -> bool:
        """Whether the policy keeps the former columns although the table has changed."""
        return self.policy == "ignore" and not _rekeyed(before, schema) and any(_changes(before, schema))

    def get(self, table: TableId, schema_id: int) -> TableSchema:
        """The schema that a change was written with."""
        return self._schemas.get(table, schema_id)

    def newest(self) -> Sequence[TableSchema]:
        """The newest schema of every table."""
        return self._schemas.newest()


def already_recorded(schemas: Schemas, schema: TableSchema) -> TableSchema | None:
    """The recorded schema for rows of this one, if the registry has it. Records nothing."""
    if isinstance(schemas, CheckedSchemas):
        return schemas.already_recorded(schema)
    return next((known for known in schemas.newest() if replace(schema, id=known.id) == known), None)


def refusal(schemas: Schemas, schema: TableSchema, before: TableSchema | None = None) -> SchemaRefused | None:
    """Why the registry would refuse this schema after `before`, or after its newest. Records nothing."""
    return schemas.refusal(schema, before) if isinstance(schemas, CheckedSchemas) else None


def stops(schemas: Schemas) -> bool:
    """Whether a refused change stops capture, instead of making the table wait."""
    return isinstance(schemas, CheckedSchemas) and schemas.policy == "exception"


def _changes(before: TableSchema, after: TableSchema) -> Iterator[tuple[str, bool]]:
    """Descriptions of the changes, each with whether it is lossless."""
    old = {column.name: column for column in before.columns}
    new = {column.name: column for column in after.columns}
    yield from ((f"column {name} was dropped", False) for name in old if name not in new)
    yield from ((f"column {name} was added", True) for name in new if name not in old)
    for name in old.keys() & new.keys():
        if (old[name].type.name, old[name].modifier) != (new[name].type.name, new[name].modifier):
            change = f"column {name} was {old[name].type.name} and is {new[name].type.name}"
            yield change, _fits(new[name], old[name])
    if _rekeyed(before, after):
        yield "its key was replaced", False


def _rekeyed(before: TableSchema, after: TableSchema) -> bool:
    """Whether the key has other columns. No policy can ignore that: the stream no longer has the old keys."""
    return {column.name for column in before.key} != {column.name for column in after.key}


def _fits(new: Column, old: Column) -> bool:
    """Whether the new type can represent every value of the old one."""
    if new.type.name == "text" or (new.type.name in _WIDER.get(old.type.name, set()) and new.modifier == -1):
        return True
    if new.type.name != old.type.name or new.modifier == -1:
        return new.type.name == old.type.name
    if old.modifier == -1:
        return False
    if new.type.name != "numeric":
        return new.modifier >= old.modifier
    (precision, scale), (former, digits) = _numeric(new.modifier), _numeric(old.modifier)
    return scale >= digits and precision - scale >= former - digits


def _numeric(modifier: int) -> tuple[int, int]:
    return (modifier - 4) >> 16, (modifier - 4) & 0x7FF

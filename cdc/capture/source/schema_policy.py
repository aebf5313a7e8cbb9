"""What a table may do to its columns: the schema policy, kept where schemas are recorded.

Stream, snapshots and backfills all record through it, so none of them can follow a change that the others refuse.
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
"""Types that hold every value of the former one. Text holds the text of all."""


class CheckedSchemas:
    """A registry that refuses what the policy forbids. `record` is the only way in."""

    def __init__(self, schemas: Schemas, policy: Policy) -> None:
        self._schemas = schemas
        self.policy = policy
        self._newest = {schema.table: schema for schema in schemas.newest()}

    def record(self, schema: TableSchema) -> TableSchema:
        """Record it, or keep the former one (`ignore`). Raises SchemaRefused; durable on return."""
        before = self._newest.get(schema.table)
        if before is not None and self._keeps(before, schema):
            if before.oid == schema.oid:
                return before
            schema = replace(before, oid=schema.oid)  # made again: the former columns, by its new oid
        if (refused := self.refusal(schema)) is not None:
            raise refused
        recorded = self._newest[schema.table] = self._schemas.record(schema)
        return recorded

    def refusal(self, schema: TableSchema, before: TableSchema | None = None) -> SchemaRefused | None:
        """What `record` would raise, if the schema before it were this one. Records nothing."""
        before = before or self._newest.get(schema.table)
        if before is None or self.policy == "evolve" or self._keeps(before, schema):
            return None
        found = _changes(before, schema)
        refused = [what for what, harmless in found if self.policy == "exception" or not harmless]
        if not refused:
            return None
        return SchemaRefused(
            f"{schema.table} changed: {'; '.join(refused)}. The policy `{self.policy}` forbids it.",
            "Undo the change, or follow it with source.schema_policy: evolve",
        )

    def standing(self, schema: TableSchema) -> TableSchema | None:
        """What `record` would return without having to store anything; None: it would store it, or refuse it."""
        before = self._newest.get(schema.table)
        if before is None or replace(schema, id=before.id) == before:
            return before
        return before if self._keeps(before, schema) else None

    def _keeps(self, before: TableSchema, schema: TableSchema) -> bool:
        """Whether the former columns stay although the table has others."""
        return self.policy == "ignore" and not _rekeyed(before, schema) and any(_changes(before, schema))

    def get(self, table: TableId, schema_id: int) -> TableSchema:
        """The schema that a change was written with."""
        return self._schemas.get(table, schema_id)

    def newest(self) -> Sequence[TableSchema]:
        """The newest schema of every table."""
        return self._schemas.newest()


def standing(schemas: Schemas, schema: TableSchema) -> TableSchema | None:
    """The schema under which rows of this one would go, if the registry has it already. Records nothing."""
    if isinstance(schemas, CheckedSchemas):
        return schemas.standing(schema)
    return next((known for known in schemas.newest() if replace(schema, id=known.id) == known), None)


def refusal(schemas: Schemas, schema: TableSchema, before: TableSchema | None = None) -> SchemaRefused | None:
    """Why the registry would not take this schema after that one, or after its newest. Records nothing."""
    return schemas.refusal(schema, before) if isinstance(schemas, CheckedSchemas) else None


def stops(schemas: Schemas) -> bool:
    """Whether a change that the registry refuses ends capture, instead of having its table wait."""
    return isinstance(schemas, CheckedSchemas) and schemas.policy == "exception"


def _changes(before: TableSchema, after: TableSchema) -> Iterator[tuple[str, bool]]:
    """What changed, in words, and whether it loses nothing."""
    old = {column.name: column for column in before.columns}
    new = {column.name: column for column in after.columns}
    yield from ((f"column {name} is gone", False) for name in old if name not in new)
    yield from ((f"column {name} is new", True) for name in new if name not in old)
    for name in old.keys() & new.keys():
        if (old[name].type.name, old[name].modifier) != (new[name].type.name, new[name].modifier):
            said = f"column {name} was {old[name].type.name} and is {new[name].type.name}"
            yield said, _holds(new[name], old[name])
    if _rekeyed(before, after):
        yield "its key is another", False


def _rekeyed(before: TableSchema, after: TableSchema) -> bool:
    """Whether rows are told apart by other columns, which no policy can pass over: their old keys are sent no more."""
    return {column.name for column in before.key} != {column.name for column in after.key}


def _holds(new: Column, old: Column) -> bool:
    """Whether the new type has room for every value of the old one."""
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

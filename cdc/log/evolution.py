"""What a changed table means for the log, by policy. Pure.

- `evolve`: follow the source, whatever it did.
- `lenient`: follow what loses nothing: new columns, wider types; a dropped column stays, without values.
- `ignore`: keep the old columns; what the table gained is left out.
- `exception`: any change stops the capture.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from cdc.model import Column, PgType, TableSchema

Policy = Literal["evolve", "lenient", "ignore", "exception"]

_INT2, _INT4, _INT8, _FLOAT4, _FLOAT8, _NUMERIC = 21, 23, 20, 700, 701, 1700
_BPCHAR, _VARCHAR, _TEXT = 1042, 1043, 25
_WIDER = {
    _INT2: frozenset({_INT4, _INT8, _NUMERIC}),
    _INT4: frozenset({_INT8, _NUMERIC}),
    _INT8: frozenset({_NUMERIC}),
    _FLOAT4: frozenset({_FLOAT8}),
    _BPCHAR: frozenset({_VARCHAR, _TEXT}),
    _VARCHAR: frozenset({_TEXT}),
}


class ChangeKind(StrEnum):
    """How a column differs from before. A rename is a drop and an addition: the source does not say more."""

    ADDED = "added"
    DROPPED = "dropped"
    WIDENED = "widened"
    NARROWED = "narrowed"
    RETYPED = "retyped"
    KEYED = "key changed"


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """One column's difference."""

    column: str
    kind: ChangeKind

    def __str__(self) -> str:
        return f"column {self.column!r} {self.kind.value}"


@dataclass(frozen=True, slots=True)
class Decision:
    """`schema` is what to record from now on; rows keep only the columns named in it. `refused` says why to stop."""

    schema: TableSchema
    changes: tuple[SchemaChange, ...] = ()
    refused: str = ""


def decide(policy: Policy, old: TableSchema | None, new: TableSchema) -> Decision:
    """What to do with a table that looks like `new` where the log knows `old` (None: never seen)."""
    if old is None:
        return Decision(new)
    changes = tuple(differences(old, new))
    if not changes or policy == "evolve":
        return Decision(new, changes)
    if policy == "exception":
        return _refuse(new, changes, changes)
    if policy == "ignore":
        return _ignored(old, new, changes)
    return _lenient(old, new, changes)


def differences(old: TableSchema, new: TableSchema) -> Iterator[SchemaChange]:
    """Every column that is not as it was, in the new table's order, dropped ones last. Order alone is no change."""
    before = {column.name: column for column in old.columns}
    for column in new.columns:
        known = before.pop(column.name, None)
        if known is None:
            yield SchemaChange(column.name, ChangeKind.ADDED)
            continue
        if (kind := _retyped(known, column)) is not None:
            yield SchemaChange(column.name, kind)
        if known.key != column.key:
            yield SchemaChange(column.name, ChangeKind.KEYED)
    for name in before:
        yield SchemaChange(name, ChangeKind.DROPPED)


def _retyped(old: Column, new: Column) -> ChangeKind | None:
    if _same(old.type, new.type):
        if old.modifier == new.modifier:
            return None
        return ChangeKind.WIDENED if _fits(old, new) else ChangeKind.NARROWED
    if new.type.oid in _WIDER.get(old.type.oid, ()):
        return ChangeKind.WIDENED if new.modifier == -1 else ChangeKind.NARROWED
    if old.type.oid in _WIDER.get(new.type.oid, ()):
        return ChangeKind.NARROWED
    return ChangeKind.RETYPED


def _same(old: PgType, new: PgType) -> bool:
    """Oids of a database's own types change when they are made anew; their names do not."""
    return old.oid == new.oid or (old.name, old.kind) == (new.name, new.kind)


def _fits(old: Column, new: Column) -> bool:
    if new.modifier == -1:
        return True
    if old.modifier == -1:
        return False
    if old.type.oid == _NUMERIC:
        (old_digits, old_scale), (digits, scale) = _digits(old.modifier), _digits(new.modifier)
        return scale >= old_scale and digits - scale >= old_digits - old_scale
    return new.modifier > old.modifier


def _digits(modifier: int) -> tuple[int, int]:
    """Precision and scale as Postgres packs them."""
    return (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0xFFFF


def _refuse(new: TableSchema, changes: tuple[SchemaChange, ...], bad: tuple[SchemaChange, ...]) -> Decision:
    return Decision(new, changes, "; ".join(str(change) for change in bad))


def _ignored(old: TableSchema, new: TableSchema, changes: tuple[SchemaChange, ...]) -> Decision:
    keys = {column.name for column in old.key}
    lost = tuple(
        change
        for change in changes
        if change.kind is ChangeKind.KEYED or (change.kind is ChangeKind.DROPPED and change.column in keys)
    )
    return _refuse(new, changes, lost) if lost else Decision(replace(old, oid=new.oid, identity=new.identity), changes)


def _lenient(old: TableSchema, new: TableSchema, changes: tuple[SchemaChange, ...]) -> Decision:
    keys = {column.name for column in old.key}
    bad = tuple(
        change
        for change in changes
        if change.kind in (ChangeKind.NARROWED, ChangeKind.RETYPED, ChangeKind.KEYED)
        or (change.kind is ChangeKind.DROPPED and change.column in keys)
    )
    if bad:
        return _refuse(new, changes, bad)
    dropped = {change.column for change in changes if change.kind is ChangeKind.DROPPED}
    kept = tuple(column for column in old.columns if column.name in dropped)
    return Decision(replace(new, columns=(*new.columns, *kept)), changes)

"""What a table's key is: the one place that decides it, for stream, snapshot, backfill, verify and every sink. Pure.

The key is what the stream marks as identifying a row (the key flags of a RELATION message): the columns of the replica
identity's index. Under identity FULL the stream marks every column, so there the primary key is the key, and the whole
row where there is none. Everybody else takes the key from the schema that is recorded with it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

FULL = "f"
"""The replica identity that sends the whole old row."""


@dataclass(frozen=True, slots=True)
class UniqueIndex:
    """A valid unique index over columns and all rows. `columns` are in its order, without those it only INCLUDEs."""

    name: str
    columns: tuple[str, ...]
    primary: bool
    identity: bool
    """Whether REPLICA IDENTITY USING INDEX names it."""
    immediate: bool
    """False for a deferrable constraint: two rows may share a key for a while, so to Postgres it is no identity."""
    not_null: bool


def primary_key(indexes: Sequence[UniqueIndex]) -> tuple[str, ...]:
    """The primary key's columns, deferrable or not; empty: there is none."""
    return next((index.columns for index in indexes if index.primary), ())


def identity_columns(identity: str, indexes: Sequence[UniqueIndex], columns: Sequence[str]) -> tuple[str, ...]:
    """What Postgres sends of an old row, which a column list or row filter must cover.

    Empty: nothing, and once the table is published its UPDATE and DELETE fail.
    """
    if identity == FULL:
        return tuple(columns)
    chosen = {"d": "primary", "i": "identity"}.get(identity, "")
    return next((index.columns for index in indexes if chosen and index.immediate and getattr(index, chosen)), ())


def key(identity: str, indexes: Sequence[UniqueIndex], columns: Collection[str]) -> tuple[str, ...]:
    """The key's columns in the order of its index; empty: the whole row is the key. `columns` are the published ones.

    A key that is not published whole tells nothing apart: then the whole row does.
    """
    if identity != FULL:
        return identity_columns(identity, indexes, ())
    names = primary_key(indexes)
    return names if all(name in columns for name in names) else ()

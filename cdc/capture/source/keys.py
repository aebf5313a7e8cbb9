"""What a table's key is, for stream, snapshot, backfill, verify and every sink. Pure.

The key is the set of columns with the key flag in a RELATION message: those of the replica identity's index. Under
identity FULL every column has the flag, so the key is the primary key, or the whole row without one. All other modules
take the key from the recorded schema.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

FULL = "f"
"""The replica identity that sends the whole old row."""


@dataclass(frozen=True, slots=True)
class UniqueIndex:
    """A valid unique index over columns and all rows. `columns` are in its order, without INCLUDE columns."""

    name: str
    columns: tuple[str, ...]
    primary: bool
    identity: bool
    """Whether REPLICA IDENTITY USING INDEX names it."""
    immediate: bool
    """False for a deferrable constraint: two rows may briefly share a key, so Postgres rejects it as an identity."""
    not_null: bool


def primary_key(indexes: Sequence[UniqueIndex]) -> tuple[str, ...]:
    """The primary key's columns, deferrable or not; empty: the table has none."""
    return next((index.columns for index in indexes if index.primary), ())


def identity_columns(identity: str, indexes: Sequence[UniqueIndex], columns: Sequence[str]) -> tuple[str, ...]:
    """The columns of an old row that Postgres sends; a column list or row filter must cover them.

    Empty: none, and once the table is published its UPDATE and DELETE fail.
    """
    if identity == FULL:
        return tuple(columns)
    chosen = {"d": "primary", "i": "identity"}.get(identity, "")
    return next((index.columns for index in indexes if chosen and index.immediate and getattr(index, chosen)), ())


def key(identity: str, indexes: Sequence[UniqueIndex], columns: Collection[str]) -> tuple[str, ...]:
    """The key's columns in the order of its index; empty: the whole row is the key. `columns` are the published ones.

    A key of which not every column is published does not identify a row: then the whole row is the key.
    """
    if identity != FULL:
        return identity_columns(identity, indexes, ())
    names = primary_key(indexes)
    return names if all(name in columns for name in names) else ()

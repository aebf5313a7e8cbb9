"""How a sink recognises that its store has lost rows which it had acknowledged.

A sink leaves a mark in each table that no other program writes (the id of an index, a key, the version of a Delta
table). Millrace keeps the mark that it saw last; a store with another mark was emptied, replaced or restored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable
from uuid import uuid4

from cdc.model import Lsn, TableId, TableSchema

Mark: TypeAlias = Mapping[str, str | int]
"""Identifies one table of a store: a few short values, kept as JSON."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a stored table differs from what was written. `message` follows the table's name in a sentence."""

    message: str
    remedy: str = ""
    refill: bool = True
    """Whether the table must be filled again; False where its rows are there and only access is missing."""
    whole_up_to: Lsn | None = None
    """Set where the store was restored from an older copy: it has everything up to this LSN."""


@runtime_checkable
class Fingerprinted(Protocol):
    """A sink that can check whether its store still has what was written. Called by one thread at a time, in parallel
    with `apply` for other tables where the sink is `ParallelTables`."""

    def mark_table(self, schema: TableSchema) -> Mark:
        """Leave a mark in a prepared table, unless it has one, and return the mark."""

    def compare_marks(self, known: Mapping[TableId, Mark], reached: Lsn) -> Mapping[TableId, Mark | Difference]:
        """Compare each table with its last known mark; returns the current mark, or the difference.

        `reached` is the position that was committed for this sink. Called every few seconds: make at most a request
        or two for all tables together. Creates nothing. Raises Busy or Lost where the store cannot be reached.
        """

    def recreate(self, schema: TableSchema) -> None:
        """Replace the table by an empty one, without tombstones and remembered truncates.

        `prepare` and `mark_table` are called next. Raise SinkError rather than delete what another program made.
        """


@runtime_checkable
class Positioned(Protocol):
    """A sink that stores its position with the rows, because its store may lose acknowledged writes in a restart."""

    def record_position(self, reached: Lsn) -> None:
        """Write to the store that it has everything up to here; called before the position is committed.

        Raises Lost where the store does not have the last written position: the next `compare_marks` finds out why.
        """


class FingerprintRecorder(Protocol):
    """Keeps the marks of one sink's store and knows which of its tables are lost."""

    @property
    def lost(self) -> frozenset[TableId]:
        """Tables that must not be written until they are filled again or restored."""

    def connected(self) -> None:
        """The store was opened: the next comparison is due at once."""

    def compare_marks(self, sink: object) -> frozenset[TableId]:
        """Compare the marks, if that is due; returns the tables that must be skipped from now on."""

    def prepared(self, sink: object, schemas: Sequence[TableSchema]) -> None:
        """These tables were prepared: mark those that were not marked before. Called before they get rows."""

    def recreated(self, sink: object, schema: TableSchema) -> None:
        """A table was replaced by an empty one: mark it again."""

    def record_position(self, sink: object, reached: Lsn) -> None:
        """Everything up to here was applied; called before the position is committed."""


def new_id() -> str:
    """A random id for a mark."""
    return uuid4().hex

"""What a store shows of itself, so that one which lost what it held is not taken for one that is up to date.

A sink leaves a mark in each table's place that nobody else writes (the id of an index, a key, the version of a Delta
table). What was seen last is kept on our side; a store that shows something else was emptied, replaced or set back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable
from uuid import uuid4

from cdc.model import Lsn, TableId, TableSchema

Mark: TypeAlias = Mapping[str, str | int]
"""What a store shows of one table: a few short values, kept as JSON."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a table in a store is not what was written there. `message` follows the table's name in a sentence."""

    message: str
    remedy: str = ""
    refill: bool = True
    """Whether the table must be made anew; False where everything is there once somebody lets us at it again."""
    whole_up_to: Lsn | None = None
    """The store is an older copy of itself, which holds everything up to this LSN."""


@runtime_checkable
class Fingerprinted(Protocol):
    """A sink whose store can tell whether it still holds what was written. Called by one thread at a time, beside
    `apply` for other tables where the sink is `SideBySide`."""

    def sign(self, schema: TableSchema) -> Mark:
        """Leave a mark in the place of a table that was prepared, unless it has one, and return what it shows."""

    def look(self, known: Mapping[TableId, Mark], reached: Lsn) -> Mapping[TableId, Mark | Difference]:
        """Compare each table with the mark that it showed last; where they agree, return what it shows now.

        `reached` is the position that was committed for this sink. Called every few seconds: at most a request or
        two for all tables together. Creates nothing. Raises Busy or Lost where the store cannot be asked.
        """

    def renew(self, schema: TableSchema) -> None:
        """Make the table's place new and empty for the rows that follow, older versions and truncates forgotten.

        `prepare` and `sign` are called next. Whatever somebody else made there is left alone, or SinkError raised.
        """


@runtime_checkable
class Positioned(Protocol):
    """A sink that keeps its position beside the rows: its store may come back without writes that it acknowledged."""

    def passed(self, reached: Lsn) -> None:
        """Note in the store that everything up to here is in it; called before the position is committed.

        Raises Lost where the store does not hold what was noted last: the next look says what became of it.
        """


class FingerprintRecorder(Protocol):
    """Whoever remembers the marks of one sink's store and knows which of its tables are lost."""

    @property
    def lost(self) -> frozenset[TableId]:
        """Tables that must not be written: they wait until they are made anew, or are as they were."""

    def connected(self) -> None:
        """The store was opened: the next look is due at once."""

    def look(self, sink: object) -> frozenset[TableId]:
        """Compare the marks if it is time; returns the tables that are to be held from now on."""

    def prepared(self, sink: object, schema: TableSchema) -> None:
        """A table was prepared: sign it if that was not done before."""

    def renewed(self, sink: object, schema: TableSchema) -> None:
        """A table was made anew: only its new mark counts."""

    def passed(self, sink: object, reached: Lsn) -> None:
        """Everything up to here was applied; called before the position is committed."""


def new_id() -> str:
    """For a mark."""
    return uuid4().hex

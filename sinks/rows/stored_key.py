"""What a store has for one key: whether the row exists, its version and where it is. Never its values."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from cdc.model import TableSchema


@dataclass(frozen=True, slots=True)
class StoredKey:
    """`deleted`: the store has a tombstone. `absent`: the store has nothing, and the version is 0."""

    state: Literal["there", "deleted", "absent"]
    version: int
    place: str


@runtime_checkable
class KeyReader(Protocol):
    """A sink that can look up a single key. Only reads; may be called while the pipeline runs."""

    def stored_key(self, schema: TableSchema, key: str) -> StoredKey:
        """What is stored under a key, given in the log's JSON form. Raises SinkError."""

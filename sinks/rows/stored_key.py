"""What a store holds of one key now: whether it is there, of which version, and where. Never its values."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from cdc.model import TableSchema


@dataclass(frozen=True, slots=True)
class StoredKey:
    """`deleted` is remembered as deleted; `absent` is not known at all, and its version is 0."""

    state: Literal["there", "deleted", "absent"]
    version: int
    place: str


@runtime_checkable
class KeyReader(Protocol):
    """A sink that can be asked for a single key. Reads the store; may be called beside a running pipeline."""

    def held(self, schema: TableSchema, key: str) -> StoredKey:
        """What is stored under a key, given as the log writes it. Raises SinkError."""

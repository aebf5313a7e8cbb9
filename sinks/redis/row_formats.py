"""The two formats of a row in Redis: JSON text, or a hash of text fields."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cdc.json_text.members import build, members, quote, splice, unquote

StoredValue = bytes | Mapping[bytes, bytes] | None
"""The reply to a read: a string's bytes, a hash's fields, or nothing."""

Command = tuple[str, ...]


class RowFormat(Protocol):
    """How a row becomes a value in Redis."""

    name: str
    read: str
    """The command that reads a row."""

    def value(self, image: bytes) -> bytes:
        """The value for the script, from the row's JSON."""

    def size_commands(self, name: str, columns: Sequence[str]) -> Sequence[Command]:
        """Commands whose replies add up to the size of the reply to `read_command`."""

    def read_command(self, name: str, columns: Sequence[str]) -> Command:
        """The command that reads the stored columns which a partial row leaves unchanged."""

    def stored(self, reply: Any, columns: Sequence[str]) -> StoredValue:  # noqa: ANN401 - untyped in redis-py
        """The value in the reply to `read_command`."""

    def merged(self, stored: StoredValue, image: str, unchanged: Sequence[str]) -> bytes | None:
        """The value of a partial row with its unchanged columns; None if they are not stored."""

    def image(self, stored: StoredValue) -> str:
        """The row as a JSON object."""


class JsonText:
    """The row's JSON, unchanged."""

    name = "json"
    read = "GET"

    def size_commands(self, name: str, columns: Sequence[str]) -> Sequence[Command]:
        return [("STRLEN", name)]

    def read_command(self, name: str, columns: Sequence[str]) -> Command:
        return ("GET", name)

    def stored(self, reply: Any, columns: Sequence[str]) -> StoredValue:  # noqa: ANN401
        return reply if isinstance(reply, bytes) else None

    def value(self, image: bytes) -> bytes:
        return image

    def merged(self, stored: StoredValue, image: str, unchanged: Sequence[str]) -> bytes | None:
        if not isinstance(stored, bytes):
            return None
        whole, lacking = splice(image, stored.decode(), unchanged)
        return None if lacking else whole.encode()

    def image(self, stored: StoredValue) -> str:
        return stored.decode() if isinstance(stored, bytes) else "{}"


class HashFields:
    """One field per column: the text of a string, the JSON of any other value. A null column has no field."""

    name = "hash"
    read = "HGETALL"

    def size_commands(self, name: str, columns: Sequence[str]) -> Sequence[Command]:
        return [("HSTRLEN", name, column) for column in columns]

    def read_command(self, name: str, columns: Sequence[str]) -> Command:
        return ("HMGET", name, *columns)

    def stored(self, reply: Any, columns: Sequence[str]) -> StoredValue:  # noqa: ANN401
        found = zip(columns, reply, strict=True)
        return {column.encode(): text for column, text in found if text is not None}

    def value(self, image: bytes) -> bytes:
        return build(_texts(image.decode())).encode()

    def merged(self, stored: StoredValue, image: str, unchanged: Sequence[str]) -> bytes | None:
        fields = _fields(stored)
        if not fields or not all(name in fields for name in unchanged):
            return None  # Postgres only leaves out large columns, which are not null
        return build(_texts(image) | {name: quote(fields[name]) for name in unchanged}).encode()

    def image(self, stored: StoredValue) -> str:
        return build({name: quote(text) for name, text in _fields(stored).items()})


ROW_FORMATS: Mapping[str, RowFormat] = {row_format.name: row_format for row_format in (JsonText(), HashFields())}


def _texts(image: str) -> dict[str, str]:
    return {name: quote(unquote(raw)) for name, raw in members(image).items() if raw != "null"}


def _fields(stored: StoredValue) -> dict[str, str]:
    return {name.decode(): text.decode() for name, text in stored.items()} if isinstance(stored, Mapping) else {}

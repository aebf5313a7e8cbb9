"""The two forms of a row in Redis: JSON text, or a hash of text fields."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cdc.json_text.members import build, members, quote, splice, unquote

StoredValue = bytes | Mapping[bytes, bytes] | None
"""What a read gave: a string's bytes, a hash's fields, or nothing."""


Command = tuple[str, ...]


class RowFormat(Protocol):
    """How a row becomes a value."""

    name: str
    read: str
    """The command that reads a row."""

    def value(self, image: bytes) -> bytes:
        """The script's value for a row."""

    def sizes(self, name: str, columns: Sequence[str]) -> Sequence[Command]:
        """Commands whose answers add up to what `kept` would bring."""

    def kept(self, name: str, columns: Sequence[str]) -> Command:
        """The command that reads what a partial row keeps of the stored one."""

    def held(self, reply: Any, columns: Sequence[str]) -> StoredValue:  # noqa: ANN401 - as the client gives it
        """Its answer."""

    def merged(self, held: StoredValue, image: str, unchanged: Sequence[str]) -> bytes | None:
        """The value of a partial row with the held columns kept; None if they are not there."""

    def image(self, held: StoredValue) -> str:
        """The row back as a JSON object."""


class JsonText:
    """The image itself."""

    name = "json"
    read = "GET"

    def sizes(self, name: str, columns: Sequence[str]) -> Sequence[Command]:
        return [("STRLEN", name)]

    def kept(self, name: str, columns: Sequence[str]) -> Command:
        return ("GET", name)

    def held(self, reply: Any, columns: Sequence[str]) -> StoredValue:  # noqa: ANN401
        return reply if isinstance(reply, bytes) else None

    def value(self, image: bytes) -> bytes:
        return image

    def merged(self, held: StoredValue, image: str, unchanged: Sequence[str]) -> bytes | None:
        if not isinstance(held, bytes):
            return None
        whole, lacking = splice(image, held.decode(), unchanged)
        return None if lacking else whole.encode()

    def image(self, held: StoredValue) -> str:
        return held.decode() if isinstance(held, bytes) else "{}"


class HashFields:
    """One field per column: a string's text, or any other value's JSON. A null column has no field."""

    name = "hash"
    read = "HGETALL"

    def sizes(self, name: str, columns: Sequence[str]) -> Sequence[Command]:
        return [("HSTRLEN", name, column) for column in columns]

    def kept(self, name: str, columns: Sequence[str]) -> Command:
        return ("HMGET", name, *columns)

    def held(self, reply: Any, columns: Sequence[str]) -> StoredValue:  # noqa: ANN401
        found = zip(columns, reply, strict=True)
        return {column.encode(): text for column, text in found if text is not None}

    def value(self, image: bytes) -> bytes:
        return build(_texts(image.decode())).encode()

    def merged(self, held: StoredValue, image: str, unchanged: Sequence[str]) -> bytes | None:
        fields = _fields(held)
        if not fields or not all(name in fields for name in unchanged):
            return None  # a column that the server leaves out is large, and so never null
        return build(_texts(image) | {name: quote(fields[name]) for name in unchanged}).encode()

    def image(self, held: StoredValue) -> str:
        return build({name: quote(text) for name, text in _fields(held).items()})


FORMS: Mapping[str, RowFormat] = {form.name: form for form in (JsonText(), HashFields())}


def _texts(image: str) -> dict[str, str]:
    return {name: quote(unquote(raw)) for name, raw in members(image).items() if raw != "null"}


def _fields(held: StoredValue) -> dict[str, str]:
    return {name.decode(): text.decode() for name, text in held.items()} if isinstance(held, Mapping) else {}

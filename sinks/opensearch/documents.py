"""What a document holds: the row's own bytes and a mark with its version; or only the mark, for a deleted row."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson

from cdc.json_text.members import build, members


@dataclass(frozen=True, slots=True)
class Documents:
    """Makes and reads documents; `metadata` is the field of the mark."""

    metadata: str
    _mark: bytes = field(init=False)
    _tombstone: bytes = field(init=False)

    def __post_init__(self) -> None:
        mark = f'"{self.metadata}":{{"version":%d}}}}'.encode()
        tombstone = f'{{"{self.metadata}":{{"version":%d,"deleted":true,"at":%b}}}}'.encode()
        object.__setattr__(self, "_mark", mark)
        object.__setattr__(self, "_tombstone", tombstone)

    def live(self, image: bytes, version: int) -> bytes:
        """The row as it is, with its mark behind the last member."""
        separator = b"" if image == b"{}" else b","
        return image[:-1] + separator + self._mark % version

    def gone(self, version: int) -> bytes:
        """A tombstone; `at` is when it was written, since a replay may write deletes of long ago."""
        return self._tombstone % (version, orjson.dumps(datetime.now(UTC)))

    def row(self, source: str) -> str | None:
        """The row inside a document; None for a tombstone."""
        values = members(source)
        mark = members(values.pop(self.metadata, "{}"))
        return None if mark.get("deleted") == "true" else build(values)

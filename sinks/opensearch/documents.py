"""Documents: the bytes of the row plus a metadata field with its version; a tombstone has the metadata field alone."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson

from cdc.json_text.members import build, members


@dataclass(frozen=True, slots=True)
class Documents:
    """Makes and reads documents; `metadata` is the name of the metadata field."""

    metadata: str
    _live_format: bytes = field(init=False)
    _tombstone_format: bytes = field(init=False)

    def __post_init__(self) -> None:
        live = f'"{self.metadata}":{{"version":%d}}}}'.encode()
        tombstone = f'{{"{self.metadata}":{{"version":%d,"deleted":true,"at":%b}}}}'.encode()
        object.__setattr__(self, "_live_format", live)
        object.__setattr__(self, "_tombstone_format", tombstone)

    def live(self, image: bytes, version: int) -> bytes:
        """The row unchanged, with the metadata field after its last member."""
        separator = b"" if image == b"{}" else b","
        return image[:-1] + separator + self._live_format % version

    def tombstone(self, version: int) -> bytes:
        """`at` is the time of the write, not of the delete: a replay may write old deletes."""
        return self._tombstone_format % (version, orjson.dumps(datetime.now(UTC)))

    def row(self, source: str) -> str | None:
        """The row in a document; None for a tombstone."""
        values = members(source)
        metadata = members(values.pop(self.metadata, "{}"))
        return None if metadata.get("deleted") == "true" else build(values)

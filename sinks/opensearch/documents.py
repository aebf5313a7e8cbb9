"""Documents: the bytes of the row plus a metadata field with its version; a tombstone has the metadata field alone."""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson

from cdc.json_text.members import build, members, quote


@dataclass(frozen=True, slots=True)
class Documents:
    """Makes and reads documents; `metadata` is the name of the metadata field. `table` is in it where the index has the
    documents of several tables."""

    metadata: str
    table: str = ""
    _live_format: bytes = field(init=False)
    _tombstone_format: bytes = field(init=False)

    def __post_init__(self) -> None:
        of_table = self._of_table.replace("%", "%%")
        live = f'"{self.metadata}":{{"version":%d{of_table}}}}}'.encode()
        tombstone = f'{{"{self.metadata}":{{"version":%d{of_table},"deleted":true,"at":%b}}}}'.encode()
        object.__setattr__(self, "_live_format", live)
        object.__setattr__(self, "_tombstone_format", tombstone)

    @property
    def _of_table(self) -> str:
        return f',"table":{quote(self.table)}' if self.table else ""

    @property
    def pattern(self) -> str:
        """A pattern of the metadata field in a live document, with the comma before it."""
        return rf',{re.escape(quote(self.metadata))}:\{{"version":[0-9]+{re.escape(self._of_table)}\}}'

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

"""Which Delta tables this pipeline has made, kept in its state folder.

A table that was there and is gone must not come back empty: the stream goes on from where it is, so the rows before
that would be missing without a word.
"""

from pathlib import Path
from uuid import uuid4

from deltalake import DeltaTable

from cdc.errors import SinkError
from cdc.model import TableId


class KnownTables:
    """One file per table, holding the id that Delta gave it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def expect_new(self, table: TableId, name: str) -> None:
        """Raises SinkError if the table was made before: creating it again would hide a loss."""
        if self._file(name).exists():
            raise SinkError(
                f"table {table}: its Delta table is gone, but was written by this pipeline.",
                self._remedy(table, name, "Bring it back"),
            )

    def remember(self, table: TableId, name: str, delta: DeltaTable) -> None:
        """Note the table's id, or raise SinkError if another table lies in its place."""
        own = str(delta.metadata().id)
        file = self._file(name)
        if not file.exists():
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            aside = file.with_suffix(f".{uuid4().hex}")
            aside.write_text(own)
            aside.replace(file)
        elif file.read_text() != own:
            raise SinkError(
                f"table {table}: another Delta table lies where this pipeline wrote its own.",
                self._remedy(table, name, "Bring the old one back"),
            )

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.id"

    def _remedy(self, table: TableId, name: str, otherwise: str) -> str:
        return (
            f"{otherwise}, or remove {self._file(name)} and have the table read again with: millrace backfill {table}"
        )

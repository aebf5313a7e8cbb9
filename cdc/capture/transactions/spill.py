"""Rows of an open transaction that is too large for memory, in unnamed files on disk.

A file has no name, so a crash leaves nothing behind. No directory listing shows its size, so it is counted here.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from cdc.errors import LogFull
from cdc.row_file import NO_ROOM, RowFile


class SpillFolder:
    """The folder of the spill files, and their total size. `check` raises LogFull if nothing may be added."""

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self.check = check
        self._files: set[RowFile] = set()

    @property
    def size(self) -> int:
        """Bytes on disk that no directory listing shows."""
        return sum(file.size for file in tuple(self._files))

    def open(self) -> "SpillFile":
        """A new file for one transaction. Raises LogFull."""
        self.check()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as unnamed:
                file = RowFile(os.dup(unnamed.fileno()), str(self.folder))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise LogFull(
                f"No room left under {self.folder}.", "Free space or raise the quota; capture then continues."
            ) from None
        self._files.add(file)
        return SpillFile(self, file)

    def forget(self, file: RowFile) -> None:
        """Free its disk space."""
        self._files.discard(file)
        file.close()


class SpillFile:
    """Rows of one transaction, written and read in order; may be read several times. For one thread at a time."""

    def __init__(self, folder: SpillFolder, file: RowFile) -> None:
        self._folder = folder
        self._file = file

    def write(self, rows: pa.Table) -> None:
        """Write rows. Raises LogFull if the disk or its budget is full: then the same call may be repeated."""
        self._folder.check()
        self._file.write(rows)

    def read(self) -> Iterator[pa.Table]:
        """Everything that was written, table by table."""
        return self._file.read()

    def discard(self) -> None:
        """Free its disk space."""
        self._folder.forget(self._file)

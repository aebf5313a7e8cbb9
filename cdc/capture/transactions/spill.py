"""Rows of a transaction that is not yet complete and too large for memory: unnamed files on disk.

A file has no name, so a crash leaves nothing behind. Nobody else can see how large it is, so that is counted here.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from cdc.errors import LogFull
from cdc.row_file import NO_ROOM, RowFile


class SpillFolder:
    """The folder of the files, and what they hold together. `check` raises LogFull where nothing may be added."""

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self.check = check
        self._files: set[RowFile] = set()

    @property
    def size(self) -> int:
        """Bytes on disk that no listing shows."""
        return sum(file.size for file in tuple(self._files))

    def open(self) -> "SpillFile":
        """Room for one more transaction. Raises LogFull."""
        self.check()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as unnamed:
                file = RowFile(os.dup(unnamed.fileno()), str(self.folder))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise LogFull(f"No room left under {self.folder}.", "Free space or raise the quota; it goes on.") from None
        self._files.add(file)
        return SpillFile(self, file)

    def forget(self, file: RowFile) -> None:
        """Give its disk space back."""
        self._files.discard(file)
        file.close()


class SpillFile:
    """Rows set aside in order, read back in order, as often as asked. Belongs to one thread at a time."""

    def __init__(self, scratch: SpillFolder, file: RowFile) -> None:
        self._scratch = scratch
        self._file = file

    def write(self, rows: pa.Table) -> None:
        """Set rows aside. Raises LogFull where the disk or its budget is: then the same call may be made again."""
        self._scratch.check()
        self._file.write(rows)

    def read(self) -> Iterator[pa.Table]:
        """Everything that was written, piece by piece."""
        return self._file.read()

    def discard(self) -> None:
        """Give the disk back."""
        self._scratch.forget(self._file)

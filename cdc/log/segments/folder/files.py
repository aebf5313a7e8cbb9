"""The files of a segment log on a disk."""

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from cdc.log.segments.segment_file import corrupt


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A Parquet file."""

    path: Path

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.path.parent.name}/{self.path.name}"

    def open(self) -> pa.NativeFile:
        """Refuses links and everything else that is not a plain file."""
        if not stat.S_ISREG(self.path.lstat().st_mode):
            raise corrupt(self.name, "is not a plain file")
        return pa.OSFile(str(self.path), "rb")


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """A Parquet file, or a folder of part files."""

    path: Path

    @property
    def name(self) -> str:
        """For messages."""
        return LocalPart(self.path).name

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(part.path.stat().st_size for part in self.parts())

    @property
    def place(self) -> str:
        """Its path."""
        return str(self.path)

    def parts(self) -> Sequence[LocalPart]:
        """The file itself, or the part files in order."""
        folder = self.path.is_dir() and not self.path.is_symlink()
        return [LocalPart(path) for path in (sorted(self.path.iterdir()) if folder else (self.path,))]

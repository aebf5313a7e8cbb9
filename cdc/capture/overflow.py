"""Rows of a transaction that is not yet complete and too large for memory: an unnamed file on disk.

The file has no name, so a crash leaves nothing behind; nothing in it is ever trusted after a restart.
"""

import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from cdc.errors import LogCorrupt, LogFull
from cdc.model import LOG_SCHEMA


class Overflow:
    """Rows set aside in order, read back in order, as often as asked. Belongs to one thread at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._file: io.FileIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by discard
        options = ipc.IpcWriteOptions(compression="lz4")
        self._writer = ipc.new_stream(self._file, LOG_SCHEMA, options=options)
        self._rows = 0
        self._written = False

    def write(self, rows: pa.Table) -> None:
        """Set rows aside. Raises LogFull where the disk is."""
        try:
            self._writer.write_table(rows)
        except OSError as error:
            raise LogFull(
                f"No room for a large transaction under {self._folder}: {os.strerror(error.errno or 0)}.",
                "Free some space; the transaction is read again.",
            ) from None
        self._rows += rows.num_rows

    def read(self) -> Iterator[pa.Table]:
        """Everything that was written, piece by piece. Nothing may be written afterwards.

        Each walk has a place of its own. The trap that it avoids: closing the writer writes its end mark wherever the
        file stands, so it is closed once, before anybody reads.
        """
        if not self._written:
            self._writer.close()
            self._written = True
        found = 0
        with ipc.open_stream(_Walk(self._file.fileno())) as reader:
            for batch in reader:
                found += batch.num_rows
                yield pa.Table.from_batches([batch])
        if found != self._rows:
            raise LogCorrupt(
                f"A large transaction was set aside with {self._rows} rows and came back with {found}.",
                f"Check the disk under {self._folder}; the transaction is read again at the next start.",
            )

    def discard(self) -> None:
        """Give the disk back."""
        self._file.close()


class _Walk(io.RawIOBase):
    """The file from its start, without moving it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - whatever can be written to
        size = os.preadv(self._descriptor, [buffer], self._at)
        self._at += size
        return size

"""Rows of a transaction that is not yet complete and too large for memory: an unnamed file on disk.

The file has no name, so a crash leaves nothing behind; nothing in it is ever trusted after a restart.
"""

import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc

from cdc.errors import LogFull
from cdc.model import LOG_SCHEMA


class Overflow:
    """Rows set aside in order, read back in order. Belongs to one thread at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._file: io.FileIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by discard
        options = ipc.IpcWriteOptions(compression="lz4")
        self._writer = ipc.new_stream(self._file, LOG_SCHEMA, options=options)

    def write(self, rows: pa.Table) -> None:
        """Set rows aside. Raises LogFull where the disk is."""
        try:
            self._writer.write_table(rows)
        except OSError as error:
            raise LogFull(
                f"No room for a large transaction under {self._folder}: {os.strerror(error.errno or 0)}.",
                "Free some space; the transaction is read again.",
            ) from None

    def read(self) -> Iterator[pa.Table]:
        """Everything that was written, piece by piece, as often as asked. Nothing may be written afterwards."""
        self._writer.close()
        self._file.seek(0)
        with ipc.open_stream(self._file) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])

    def discard(self) -> None:
        """Give the disk back."""
        self._file.close()

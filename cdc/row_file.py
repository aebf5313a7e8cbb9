"""Rows of one transaction in a file on disk: written all or nothing, read in order.

For transactions that are too large for memory and not yet complete. Such a file is never used after a restart.
"""

import errno
import io
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from cdc.errors import LogCorrupt, LogError, LogFull
from cdc.model import LOG_SCHEMA

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_OPTIONS = ipc.IpcWriteOptions(compression="lz4")


class RowFile:
    """One open file; owns its descriptor. Not for two threads at once. Errors name `folder`."""

    def __init__(self, descriptor: int, folder: str) -> None:
        self._descriptor = descriptor
        self._folder = folder
        self._parts: list[tuple[int, int]] = []
        """Where each write begins and ends: each is a separate Arrow stream."""
        self._rows = 0

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self._parts[-1][1] if self._parts else 0

    def write(self, rows: pa.Table) -> None:
        """Append rows. After LogFull nothing was added, and the caller may repeat the call."""
        encoded = pa.BufferOutputStream()
        with ipc.new_stream(encoded, LOG_SCHEMA, options=_OPTIONS) as stream:
            stream.write_table(rows)
        begin = at = self.size
        left = memoryview(encoded.getvalue())
        try:
            while left:
                written = os.pwrite(self._descriptor, left, at)
                at, left = at + written, left[written:]
        except OSError as error:
            os.ftruncate(self._descriptor, begin)
            raise self._failed(error) from None
        self._parts.append((begin, at))
        self._rows += rows.num_rows

    def read(self) -> Iterator[pa.Table]:
        """All rows in batches. Several iterators may be used at once."""
        found = 0
        for begin, end in self._parts:
            with ipc.open_stream(_Part(self._descriptor, begin, end)) as reader:
                for batch in reader:
                    found += batch.num_rows
                    yield pa.Table.from_batches([batch])
        if found != self._rows:
            raise LogCorrupt(
                f"A large transaction was written to disk with {self._rows} rows, but {found} were read back.",
                f"Check the disk under {self._folder}; Postgres sends the transaction again at the next start.",
            )

    def close(self) -> None:
        """Close the file; does nothing if it is closed already."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._parts = []

    def _failed(self, error: OSError) -> LogError:
        if error.errno in NO_ROOM:
            return LogFull(
                f"No disk space for a large transaction under {self._folder}.",
                "Free space or raise the quota; capture then continues by itself.",
            )
        return LogError(
            f"Writing a large transaction under {self._folder} failed: {error.strerror}.",
            "Check the disk and the folder's permissions.",
        )


class _Part(io.RawIOBase):
    """A part of the file, read without moving the file's own position."""

    def __init__(self, descriptor: int, begin: int, end: int) -> None:
        self._descriptor = descriptor
        self._at = begin
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - whatever can be written to
        wanted = memoryview(buffer)[: self._end - self._at]
        size = os.preadv(self._descriptor, [wanted], self._at)
        self._at += size
        return size

"""Rows of one transaction in a file on disk: appended all or nothing, read back in order.

For transactions that are too large for memory and not yet complete. Nothing in such a file is trusted after a restart.
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
    """One open file; owns its descriptor. Belongs to one thread at a time. `place` names its folder in errors."""

    def __init__(self, descriptor: int, place: str) -> None:
        self._descriptor = descriptor
        self._place = place
        self._parts: list[tuple[int, int]] = []
        """Where each write begins and ends: every one is an Arrow stream of its own."""
        self._rows = 0

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self._parts[-1][1] if self._parts else 0

    def write(self, rows: pa.Table) -> None:
        """Append rows. Raises LogFull: then nothing was added, and the same call may be made again."""
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
        """Everything that was written, piece by piece; each walk has a place of its own."""
        found = 0
        for begin, end in self._parts:
            with ipc.open_stream(_Part(self._descriptor, begin, end)) as reader:
                for batch in reader:
                    found += batch.num_rows
                    yield pa.Table.from_batches([batch])
        if found != self._rows:
            raise LogCorrupt(
                f"A large transaction was set aside with {self._rows} rows and came back with {found}.",
                f"Check the disk under {self._place}; the transaction is read again at the next start.",
            )

    def close(self) -> None:
        """Let the file go; no error if it is gone already."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._parts = []

    def _failed(self, error: OSError) -> LogError:
        if error.errno in NO_ROOM:
            return LogFull(
                f"No room for a large transaction under {self._place}.", "Free space or raise the quota; it goes on."
            )
        return LogError(
            f"Setting a large transaction aside under {self._place} failed: {error.strerror}.",
            "Look at the disk and the folder's permissions.",
        )


class _Part(io.RawIOBase):
    """A stretch of the file, read without moving it."""

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

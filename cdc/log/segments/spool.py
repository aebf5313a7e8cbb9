"""One transaction too large for memory: parts that no reader sees, published in one step."""

from typing import Protocol

import pyarrow as pa

from cdc import failpoint
from cdc.errors import LogError
from cdc.log.segments import segment_file
from cdc.log.segments.storage import Parts
from cdc.model import LOG_SCHEMA, Lsn

_PART_BYTES = 32 << 20
"""Rows are buffered until they fill a part of this size: a part per message batch would make thousands of files."""


class Publish(Protocol):
    """Makes durable parts the next segment; False if the log already has it."""

    def __call__(self, parts: Parts, extent: segment_file.Extent, end: Lsn) -> bool: ...


class SegmentSpool:
    """Buffers rows and writes them as parts. After LogFull the caller may repeat the call: earlier parts are kept."""

    def __init__(self, publish: Publish, parts: Parts) -> None:
        self._publish = publish
        self._parts = parts
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self._written = False
        self._extent = segment_file.Extent()
        self._closed = False

    def write(self, rows: pa.Table) -> None:
        """Buffer rows, and write a part once there are enough."""
        self._require_open()
        if self._pending_bytes >= _PART_BYTES:
            self._flush()
        self._pending.append(segment_file.checked(rows))
        self._pending_bytes += rows.nbytes

    def publish(self, end: Lsn) -> None:
        """Make the transaction visible in one step, or discard it if the log already has it."""
        self._require_open()
        if self._pending or not self._written:
            self._flush()
        self._parts.sync()
        failpoint.reached("log.spool_publish")
        if not self._publish(self._parts, self._extent, end):
            self.discard()
        self._closed = True

    def discard(self) -> None:
        """Remove the parts."""
        self._closed = True
        self._pending.clear()
        self._parts.discard()

    def _require_open(self) -> None:
        if self._closed:
            raise LogError("This spool was already published or discarded.", "Begin a new one.")

    def _flush(self) -> None:
        rows = pa.concat_tables(self._pending) if self._pending else LOG_SCHEMA.empty_table()
        self._parts.add(rows)
        self._written = True
        self._pending.clear()
        self._pending_bytes = 0
        self._extent = self._extent.with_more(segment_file.Extent.of(rows))

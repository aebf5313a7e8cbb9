"""One transaction too large for memory: part files in a staging folder, published by one rename of that folder."""

import secrets
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from cdc import failpoint
from cdc.durable_files import FOLDER_MODE, remove, sync_folder, write_errors, write_new
from cdc.errors import LogError
from cdc.log.segments import segment_file
from cdc.model import LOG_SCHEMA, Lsn

_PART_BYTES = 32 << 20
"""Rows are buffered until they fill a part of this size: a part per message batch would make thousands of files."""
_NO_FACTS = segment_file.Metadata({}, ())


Publish = Callable[[Path, segment_file.Extent, Lsn], bool]
"""Renames a synced folder to become the next segment; False if the log already has it."""


class SegmentSpool:
    """Part files on disk. After LogFull the caller may repeat the call: earlier parts are kept."""

    def __init__(
        self, publish: Publish, staging: Path, compression: segment_file.Compression, by_bucket: bool = False
    ) -> None:
        self._publish = publish
        self._staging = staging
        self._folder = staging / f"spool-{secrets.token_hex(8)}"
        self._compression = compression
        self._by_bucket = by_bucket
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self._parts = 0
        self._extent = segment_file.Extent()
        self._synced = False
        self._closed = False

    def write(self, rows: pa.Table) -> None:
        """Buffer rows, and write a part file once there are enough."""
        self._require_open()
        if self._pending_bytes >= _PART_BYTES:
            self._flush()
        self._pending.append(segment_file.checked(rows))
        self._pending_bytes += rows.nbytes

    def publish(self, end: Lsn) -> None:
        """Make the transaction visible in one step, or discard it if the log already has it."""
        self._require_open()
        if self._pending or not self._parts:
            self._flush()
        if not self._synced:
            with write_errors(self._staging):
                sync_folder(self._folder)
            self._synced = True  # a repeated call may find the folder already renamed
        failpoint.reached("log.spool_publish")
        if not self._publish(self._folder, self._extent, end):
            self.discard()
        self._closed = True

    def discard(self) -> None:
        """Remove the part files."""
        self._closed = True
        self._pending.clear()
        remove(self._folder)

    def _require_open(self) -> None:
        if self._closed:
            raise LogError("This spool was already published or discarded.", "Begin a new one.")

    def _flush(self) -> None:
        rows = pa.concat_tables(self._pending) if self._pending else LOG_SCHEMA.empty_table()
        data = segment_file.encode(rows, _NO_FACTS, self._compression, by_bucket=self._by_bucket)
        with write_errors(self._staging):
            if not self._parts:
                self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            write_new(self._folder / f"part-{self._parts:06d}.parquet", memoryview(data))
        self._parts += 1
        self._pending.clear()
        self._pending_bytes = 0
        self._extent = self._extent.with_more(segment_file.Extent.of(rows))

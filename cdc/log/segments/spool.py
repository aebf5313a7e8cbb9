"""One transaction too large for memory: part files in a hidden folder, published by one rename of that folder."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from cdc import failpoint
from cdc.durable_files import FOLDER_MODE, remove, room, sync_folder, write_new
from cdc.errors import LogError
from cdc.log.segments import segment_file
from cdc.model import LOG_SCHEMA, Lsn

_PART_BYTES = 32 << 20
"""Rows are held until they make a part of this size: parts of one message batch each would be thousands of files."""
_NO_FACTS = segment_file.Facts({}, ())


class SegmentPublisher(Protocol):
    """What a spool needs of the writer."""

    def publish(self, aside: Path, extent: segment_file.Extent, end: Lsn, marks: Mapping[str, str]) -> bool:
        """Rename into place as the next sequence number; False if the log has it already."""


class SegmentSpool:
    """Parts on disk. After LogFull the same call may be made again: what was set aside before stays."""

    def __init__(self, writer: SegmentPublisher, aside: Path, compression: segment_file.Compression) -> None:
        self._writer = writer
        self._aside = aside
        self._folder = aside / f"spool-{secrets.token_hex(8)}"
        self._compression = compression
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._parts = 0
        self._extent = segment_file.Extent()
        self._synced = False
        self._over = False

    def write(self, rows: pa.Table) -> None:
        """Hold rows, and set a part aside once there are enough."""
        self._must_be_open()
        if self._held_bytes >= _PART_BYTES:
            self._flush()
        self._held.append(segment_file.checked(rows))
        self._held_bytes += rows.nbytes

    def publish(self, end: Lsn) -> None:
        """Make it visible at once, or forget it if the log has it already."""
        self._must_be_open()
        if self._held or not self._parts:
            self._flush()
        if not self._synced:
            with room(self._aside):
                sync_folder(self._folder)
            self._synced = True  # at a second try the folder may have left its place already
        failpoint.reached("log.spool_publish")
        if not self._writer.publish(self._folder, self._extent, end, {}):
            self.discard()
        self._over = True

    def discard(self) -> None:
        """Forget it."""
        self._over = True
        self._held.clear()
        remove(self._folder)

    def _must_be_open(self) -> None:
        if self._over:
            raise LogError("This spool was published or discarded.", "Begin a new one.")

    def _flush(self) -> None:
        rows = pa.concat_tables(self._held) if self._held else LOG_SCHEMA.empty_table()
        data = segment_file.encode(rows, _NO_FACTS, self._compression)
        with room(self._aside):
            if not self._parts:
                self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            write_new(self._folder / f"part-{self._parts:06d}.parquet", memoryview(data))
        self._parts += 1
        self._held.clear()
        self._held_bytes = 0
        self._extent = self._extent.with_more(segment_file.Extent.of(rows))

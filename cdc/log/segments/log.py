"""The segment log: Parquet files in a folder, one writer, any number of readers, no server.

A segment is written to a staging folder, synced and renamed into `hot/`. The rename commits rows and position together,
and a restart reads the position from the file names. See docs/adr/0005-segment-log.md.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from cdc import failpoint
from cdc.config.settings import LogSettings, Settings
from cdc.durable_files import make_folder, remove, sync_folder, write_errors, write_new
from cdc.errors import LogError, LogFull
from cdc.log.registry import LogKind
from cdc.log.segments import segment_file
from cdc.log.segments.compaction import compact, count_replaced
from cdc.log.segments.consumers import Consumers
from cdc.log.segments.folder import LogFolder
from cdc.log.segments.merge import SegmentMerger, recover_marks, sizes_of
from cdc.log.segments.reader import SegmentReader
from cdc.log.segments.retention import SegmentRetention
from cdc.log.segments.schemas import FolderSchemas
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.spool import SegmentSpool
from cdc.log.segments.writer_lock import WriterLock
from cdc.model import Entry, Lsn, Progress
from cdc.ports import Schemas

_REOPEN = "Restart the process: it reads the durable position again."


class SegmentSettings(LogSettings):
    """A log of Parquet files under the state folder."""

    kind: Literal["segments"] = "segments"
    compression: segment_file.Compression = "lz4"
    """Compression of fresh segments. Merged segments always use zstd. lz4 halves the CPU cost of small segments."""
    hot_segments: int = Field(512, ge=1)
    """Number of unmerged fresh segments above which a merge runs."""
    segment_mb: float = Field(96.0, gt=0)
    """Size in MB from which a merged segment is not merged again."""


class SegmentWriter:
    """Appends to the folder. Safe to call from several threads; appends one entry at a time."""

    def __init__(
        self, root: Path, settings: SegmentSettings, takeover: bool = False, *, by_bucket: bool = False
    ) -> None:
        self._settings = settings
        self._by_bucket = by_bucket
        self._folder = LogFolder(root)
        self._schemas = FolderSchemas(root / "schemas")
        self._lock = threading.RLock()
        self._maintaining = threading.Lock()
        self._broken = False
        self._unsynced: tuple[Segment, Mapping[str, str]] | None = None
        """A segment that was renamed, but whose folder could not be synced because the disk was full."""
        self._writer_lock = WriterLock.take(root, takeover)
        self._history = SegmentMerger(self._folder, self._writer_lock, by_bucket)
        self._retention = SegmentRetention(self._history, Consumers(root / "consumers"))
        try:
            make_folder(self._folder.hot)
            make_folder(self._folder.history)
            view = self._folder.view()
            self._sequence = view.chain.head
            self._progress = Progress(view.chain.end, recover_marks(view))
        except BaseException:
            self._writer_lock.release()
            raise

    def progress(self) -> Progress:
        """The durable position and marks."""
        return self._progress

    @property
    def schemas(self) -> Schemas:
        """The schema registry of this log."""
        return self._schemas

    def append(self, entry: Entry) -> None:
        """Write one segment. Ignores an entry that the log already has."""
        with self._lock:
            self._sync_pending()
            if self._is_repeat(entry.end, entry.marks):
                return
            failpoint.reached("log.before_write")
            rows = segment_file.checked(entry.rows)
            metadata, compression = segment_file.Metadata(entry.marks, ()), self._settings.compression
            data = segment_file.encode(rows, metadata, compression, by_bucket=self._by_bucket)
            staged = self._writer_lock.staging / f"{self._sequence + 1}.parquet"
            try:
                with write_errors(self._writer_lock.staging):
                    write_new(staged, memoryview(data))
                self._publish(staged, segment_file.Extent.of(rows), entry.end, entry.marks)
            except BaseException:
                remove(staged)  # the next attempt creates a file of the same name
                raise
            failpoint.reached("log.after_append")

    def spool(self) -> SegmentSpool:
        """Begin a transaction that is too large for memory."""
        publish = partial(self._publish, marks={})
        return SegmentSpool(publish, self._writer_lock.staging, self._settings.compression, self._by_bucket)

    def _publish(self, staged: Path, extent: segment_file.Extent, end: Lsn, marks: Mapping[str, str]) -> bool:
        """Rename a synced file or folder to become the next segment; False if the log already has it.

        After LogFull the caller may repeat the call.
        """
        with self._lock:
            self._sync_pending()
            if self._is_repeat(end, marks):
                return False
            segment = self._next_segment(extent, max(end, self._progress.end), bool(marks))
            failpoint.reached("log.before_rename")
            self._writer_lock.rename(staged, self._folder.hot / str(segment))
            self._unsynced = (segment, marks)
            self._sync_pending()
            return True

    def _sync_pending(self) -> None:
        """Make the last renamed segment durable; only then does it count. After LogFull the next call tries again."""
        if self._broken:
            raise LogError("An earlier sync of the log folder failed.", _REOPEN)
        if self._unsynced is None:
            return
        segment, marks = self._unsynced
        try:
            with write_errors(self._folder.hot):
                sync_folder(self._folder.hot)
        except LogFull:
            raise
        except LogError as error:
            # The segment is visible but perhaps not durable: only a new listing after a restart can tell.
            self._broken = True
            raise LogError(f"The log folder could not be synced. {error.message}", _REOPEN) from None
        self._unsynced = None
        self._sequence = segment.stop
        self._progress = Progress(segment.end, {**self._progress.marks, **marks})

    def _next_segment(self, extent: segment_file.Extent, end: Lsn, marks: bool) -> Segment:
        number = self._sequence + 1
        first, last = (extent.first, extent.last) if extent.rows else (end, end)
        return Segment(number, number, 0, first, last, end, extent.rows, extent.newest, marks)

    def _is_repeat(self, end: Lsn, marks: Mapping[str, str]) -> bool:
        known = self._progress
        return end <= known.end and all(known.marks.get(key) == value for key, value in marks.items())

    @property
    def append_interval(self) -> float:
        """An append costs the writer a few syncs and every reader one more file to open."""
        return 0.03

    @property
    def _target(self) -> int:
        return int(self._settings.segment_mb * 2**20)

    def maintain(self) -> None:
        """Merge small old segments, and remove segments past retention."""
        with self._maintaining:
            self._history.remove_superseded()
            self._history.merge(self._settings.hot_segments, self._target)
            self._retention.apply(self._settings.retention_hours, self._settings.retention_gb)

    def compact(self, force: bool = False, whole: bool = False) -> int:
        """Remove row versions from history that newer ones replace; returns how many. `force` ignores the consumers.

        `whole` merges fresh segments into history first, so that they are compacted too.
        """
        with self._maintaining:
            protected = None if force else self._retention.protected()
            if whole:
                self._history.merge(0, self._target, protected)
            return compact(self._history, protected)

    def compactable(self, force: bool = False) -> int:
        """How many row versions `compact(whole=True)` would remove. Changes nothing."""
        protected = None if force else self._retention.protected()
        return count_replaced(self._history.view(), protected, self._target // 4)

    def trim(self, hours: float, gigabytes: float, force: bool = False) -> int:
        """Remove entries past this age or beyond this size; returns how many. `force` ignores the consumers."""
        with self._maintaining:
            return self._retention.apply(hours, gigabytes, force)

    def trimmable(self, hours: float, gigabytes: float, force: bool = False) -> Sequence[Segment]:
        """The segments that `trim` would remove. Changes nothing."""
        return self._retention.due(self._history.view(), hours, gigabytes, force)

    @property
    def size(self) -> int:
        """Bytes on disk of all readable segments."""
        return sum(sizes_of(self._history.view()).values())

    def close(self) -> None:
        """Release the writer lock."""
        self._writer_lock.release()


def folder_of(settings: Settings) -> Path:
    """The folder of a pipeline's segment log."""
    return settings.state / "log"


def _open_writer(settings: Settings) -> SegmentWriter:
    make_folder(settings.state)
    own = _segment_settings(settings)
    return SegmentWriter(folder_of(settings), own, by_bucket=settings.spark.on_cluster)


def _segment_settings(settings: Settings) -> SegmentSettings:
    log = settings.log
    return log if isinstance(log, SegmentSettings) else SegmentSettings(**log.model_dump(exclude={"kind"}))


def _open_reader(settings: Settings) -> SegmentReader:
    return SegmentReader(folder_of(settings))


KIND = LogKind(SegmentSettings, _open_writer, _open_reader)

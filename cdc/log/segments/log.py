"""The segment log: Parquet files in a folder or a bucket, one writer, any number of readers, no server of its own.

Making a segment visible is one step, a rename or a conditional PUT. It commits rows and position together, and a
restart reads the position from the segments. See docs/adr/0005-segment-log.md, docs/adr/0027-segments-in-a-bucket.md.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from cdc import failpoint
from cdc.config.settings import LogSettings, SecretField, Settings
from cdc.durable_files import make_folder
from cdc.errors import LogError, LogFull
from cdc.log.registry import LogKind
from cdc.log.segments import segment_file
from cdc.log.segments.bucket.access import check_bucket
from cdc.log.segments.bucket.writer import BucketWriter
from cdc.log.segments.compaction import compact, count_replaced
from cdc.log.segments.consumers import Consumers
from cdc.log.segments.folder.writer import FolderWriter
from cdc.log.segments.merge import SegmentMerger, recover_marks, sizes_of
from cdc.log.segments.reader import SegmentReader, storage_at
from cdc.log.segments.retention import SegmentRetention
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.spool import SegmentSpool
from cdc.log.segments.storage import LogLocation, Parts, WriterStorage
from cdc.model import Entry, Lsn, Progress
from cdc.ports import Schemas

_REOPEN = "Restart the process: it reads the durable position again."


class SegmentSettings(LogSettings):
    """A log of Parquet files, under the state folder or in a bucket."""

    kind: Literal["segments"] = "segments"
    uri: str = Field("", pattern=r"^(s3a?://[^/?#]+(/[^?#]*)?)?$")
    """A bucket and a prefix of this log's own (`s3://bucket/prefix`), in S3 or a store with its protocol that honours
    `If-None-Match`. Empty: the folder `log` under the state folder."""
    storage_options: dict[str, SecretField] = Field(default_factory=dict)
    """Options of the bucket, by the names of object_store (`aws_access_key_id`, `aws_region`, `aws_endpoint_url`, ...).
    What is not set is taken from the environment's AWS_ variables, or from the machine's role."""
    compression: segment_file.Compression = "lz4"
    """Compression of fresh segments. Merged segments always use zstd. lz4 halves the CPU cost of small segments."""
    hot_segments: int = Field(512, ge=1)
    """Number of unmerged fresh segments above which a merge runs."""
    segment_mb: float = Field(96.0, gt=0)
    """Size in MB from which a merged segment is not merged again."""


class SegmentWriter:
    """Appends segments. Safe to call from several threads; appends one entry at a time."""

    def __init__(self, storage: WriterStorage, settings: SegmentSettings, *, by_bucket: bool = False) -> None:
        self._settings = settings
        self._storage = storage
        self._lock = threading.RLock()
        self._maintaining = threading.Lock()
        self._broken = False
        self._unsynced: tuple[Segment, Mapping[str, str]] | None = None
        """A segment that is visible, but not yet durable because the disk was full."""
        self._history = SegmentMerger(storage, by_bucket)
        self._retention = SegmentRetention(self._history, Consumers(storage.consumers))
        try:
            view = storage.view()
            self._sequence = view.chain.head
            self._progress = Progress(view.chain.end, recover_marks(view))
        except BaseException:
            storage.close()
            raise

    def progress(self) -> Progress:
        """The durable position and marks."""
        return self._progress

    @property
    def schemas(self) -> Schemas:
        """The schema registry of this log."""
        return self._storage.schemas

    def append(self, entry: Entry) -> None:
        """Write one segment. Ignores an entry that the log already has."""
        with self._lock:
            self._sync_pending()
            if self._is_repeat(entry.end, entry.marks):
                return
            failpoint.reached("log.before_write")
            rows = segment_file.checked(entry.rows)
            append = partial(self._storage.append, rows=rows, marks=entry.marks)
            self._publish(append, segment_file.Extent.of(rows), entry.end, entry.marks)
            failpoint.reached("log.after_append")

    def spool(self) -> SegmentSpool:
        """Begin a transaction that is too large for memory."""
        return SegmentSpool(self._publish_parts, self._storage.new_parts())

    def _publish_parts(self, parts: Parts, extent: segment_file.Extent, end: Lsn) -> bool:
        return self._publish(partial(self._storage.append_parts, parts=parts), extent, end, {})

    def _publish(
        self, append: Callable[[Segment], None], extent: segment_file.Extent, end: Lsn, marks: Mapping[str, str]
    ) -> bool:
        """Append the next segment; False if the log already has it. After LogFull the caller may repeat the call."""
        with self._lock:
            self._sync_pending()
            if self._is_repeat(end, marks):
                return False
            segment = self._next_segment(extent, max(end, self._progress.end), bool(marks))
            append(segment)
            self._unsynced = (segment, marks)
            self._sync_pending()
            return True

    def _sync_pending(self) -> None:
        """Make the last visible segment durable; only then does it count. After LogFull the next call tries again."""
        if self._broken:
            raise LogError("An earlier sync of the log folder failed.", _REOPEN)
        if self._unsynced is None:
            return
        segment, marks = self._unsynced
        try:
            self._storage.sync()
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
        """That of the folder or the bucket."""
        return self._storage.append_interval

    @property
    def _target(self) -> int:
        return int(self._settings.segment_mb * 2**20)

    def maintain(self) -> None:
        """Merge small old segments, and remove segments past retention."""
        with self._maintaining:
            self._storage.clean()
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
        """Let the next writer start."""
        self._storage.close()


def location_of(settings: Settings) -> LogLocation:
    """Where a pipeline's segments are."""
    own = _segment_settings(settings)
    if not own.uri:
        return LogLocation(os.fspath((settings.state / "log").absolute()))
    options = {name: secret.reveal() for name, secret in own.storage_options.items()}
    return LogLocation(own.uri, tuple(sorted(options.items())))


def writer_storage(settings: Settings, unreadable: int = 0) -> WriterStorage:
    """The folder or bucket, for the only writer. Raises LogFenced while another process of this machine writes.

    `unreadable` is the number of a segment that may be unreadable.
    """
    own, location = _segment_settings(settings), location_of(settings)
    make_folder(settings.state)
    encoding = segment_file.Encoding(own.compression, settings.spark.on_cluster)
    if location.in_bucket:
        return BucketWriter(location, settings.state / "log", encoding, unreadable)
    return FolderWriter(Path(location.root), encoding)


def _open_writer(settings: Settings) -> SegmentWriter:
    storage = writer_storage(settings)
    return SegmentWriter(storage, _segment_settings(settings), by_bucket=settings.spark.on_cluster)


def _segment_settings(settings: Settings) -> SegmentSettings:
    log = settings.log
    return log if isinstance(log, SegmentSettings) else SegmentSettings(**log.model_dump(exclude={"kind"}))


def _open_reader(settings: Settings) -> SegmentReader:
    return SegmentReader(storage_at(location_of(settings)))


def _check_bucket(settings: Settings, seconds: float) -> None:
    location = location_of(settings)
    if location.in_bucket:
        check_bucket(location, seconds)


KIND = LogKind(SegmentSettings, _open_writer, _open_reader, _check_bucket)

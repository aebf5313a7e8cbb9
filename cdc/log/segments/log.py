"""The segment log: Parquet files in a folder, one writer, any number of readers, no server.

A segment is written aside, synced and renamed into place: the rename is the commit, so "appended" and "position" are
one fact, and a restart reads the position off the names. See docs/adr/0005-segment-log.md.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from cdc import failpoint
from cdc.config.settings import LogSettings, Settings
from cdc.durable_files import make_folder, remove, room, sync_folder, write_new
from cdc.errors import LogError, LogFull
from cdc.log.registry import LogKind
from cdc.log.segments import segment_file
from cdc.log.segments.compaction import compact, replaced
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

_REOPEN = "Restart: what is durable is read again."


class SegmentSettings(LogSettings):
    """A log of Parquet files under the state folder."""

    kind: Literal["segments"] = "segments"
    compression: segment_file.Compression = "lz4"
    """Of fresh segments; history is always zstd. Small segments cost half the CPU with lz4."""
    hot_segments: int = Field(512, ge=1)
    """How many fresh segments may lie unmerged before a merge is due."""
    segment_mb: float = Field(96.0, gt=0)
    """Size at which a merged segment is left alone."""


class SegmentWriter:
    """Appends to the folder; safe to call from several threads, one entry at a time."""

    def __init__(self, root: Path, settings: SegmentSettings, takeover: bool = False) -> None:
        self._settings = settings
        self._folder = LogFolder(root)
        self._schemas = FolderSchemas(root / "schemas")
        self._lock = threading.RLock()
        self._maintaining = threading.Lock()
        self._broken = False
        self._unsynced: tuple[Segment, Mapping[str, str]] | None = None
        """Renamed into place, but the sync of its folder has found no room."""
        self._lease = WriterLock.take(root, takeover)
        self._history = SegmentMerger(self._folder, self._lease)
        self._retention = SegmentRetention(self._history, Consumers(root / "consumers"))
        try:
            make_folder(self._folder.hot)
            make_folder(self._folder.history)
            view = self._folder.view()
            self._sequence = view.chain.head
            self._progress = Progress(view.chain.end, recover_marks(view))
        except BaseException:
            self._lease.release()
            raise

    def progress(self) -> Progress:
        """What is durable."""
        return self._progress

    @property
    def schemas(self) -> Schemas:
        """The registry kept with this log."""
        return self._schemas

    def append(self, entry: Entry) -> None:
        """Write one segment; ignores an entry that was appended before."""
        with self._lock:
            self._settle()
            if self._is_repeat(entry.end, entry.marks):
                return
            failpoint.reached("log.before_write")
            rows = segment_file.checked(entry.rows)
            data = segment_file.encode(rows, segment_file.Facts(entry.marks, ()), self._settings.compression)
            aside = self._lease.aside / f"{self._sequence + 1}.parquet"
            try:
                with room(self._lease.aside):
                    write_new(aside, memoryview(data))
                self.publish(aside, segment_file.Extent.of(rows), entry.end, entry.marks)
            except BaseException:
                remove(aside)  # the next try writes a file of that name
                raise
            failpoint.reached("log.after_append")

    def spool(self) -> SegmentSpool:
        """Begin a transaction too large for memory."""
        return SegmentSpool(self, self._lease.aside, self._settings.compression)

    def publish(self, aside: Path, extent: segment_file.Extent, end: Lsn, marks: Mapping[str, str]) -> bool:
        """Rename a synced file or folder into place as the next sequence number; False if the log has it already.

        After LogFull the same call may be made again.
        """
        with self._lock:
            self._settle()
            if self._is_repeat(end, marks):
                return False
            segment = self._named(extent, max(end, self._progress.end), bool(marks))
            failpoint.reached("log.before_rename")
            self._lease.rename(aside, self._folder.hot / str(segment))
            self._unsynced = (segment, marks)
            self._settle()
            return True

    def _settle(self) -> None:
        """Make the segment that was renamed last durable; only then does it count. LogFull: it is tried again."""
        if self._broken:
            raise LogError("An earlier sync of the log folder failed.", _REOPEN)
        if self._unsynced is None:
            return
        segment, marks = self._unsynced
        try:
            with room(self._folder.hot):
                sync_folder(self._folder.hot)
        except LogFull:
            raise
        except LogError as error:
            # Visible but perhaps not durable: only a fresh look at the folder can tell.
            self._broken = True
            raise LogError(f"The log folder could not be synced. {error.message}", _REOPEN) from None
        self._unsynced = None
        self._sequence = segment.stop
        self._progress = Progress(segment.end, {**self._progress.marks, **marks})

    def _named(self, extent: segment_file.Extent, end: Lsn, marks: bool) -> Segment:
        number = self._sequence + 1
        first, last = (extent.first, extent.last) if extent.rows else (end, end)
        return Segment(number, number, 0, first, last, end, extent.rows, extent.newest, marks)

    def _is_repeat(self, end: Lsn, marks: Mapping[str, str]) -> bool:
        known = self._progress
        return end <= known.end and all(known.marks.get(key) == value for key, value in marks.items())

    @property
    def pace(self) -> float:
        """A few syncs for the writer, a file to open for each reader."""
        return 0.03

    @property
    def _target(self) -> int:
        return int(self._settings.segment_mb * 2**20)

    def maintain(self) -> None:
        """Merge what is small and old, remove what is past retention."""
        with self._maintaining:
            self._history.tidy()
            self._history.merge(self._settings.hot_segments, self._target)
            self._retention.apply(self._settings.retention_hours, self._settings.retention_gb)

    def compact(self, force: bool = False, whole: bool = False) -> int:
        """Drop versions in history that newer ones replace; returns how many. `force` ignores the consumers.

        `whole` merges fresh segments into history first, so that their versions count too.
        """
        with self._maintaining:
            protected = None if force else self._retention.protected()
            if whole:
                self._history.merge(0, self._target, protected)
            return compact(self._history, protected)

    def compactable(self, force: bool = False) -> int:
        """How many versions a whole compaction would drop. Changes nothing."""
        protected = None if force else self._retention.protected()
        return replaced(self._history.view(), protected, self._target // 4)

    def trim(self, hours: float, gigabytes: float, force: bool = False) -> int:
        """Remove what is older or beyond that size; returns how many entries went. `force` ignores the consumers."""
        with self._maintaining:
            return self._retention.apply(hours, gigabytes, force)

    def trimmable(self, hours: float, gigabytes: float, force: bool = False) -> Sequence[Segment]:
        """The segments that `trim` would remove. Changes nothing."""
        return self._retention.due(self._history.view(), hours, gigabytes, force)

    @property
    def size(self) -> int:
        """Bytes on disk of everything that can be read."""
        return sum(sizes_of(self._history.view()).values())

    def close(self) -> None:
        """Let go of the lock."""
        self._lease.release()


def folder_of(settings: Settings) -> Path:
    """Where the segment log of a pipeline lies."""
    return settings.state / "log"


def _open_writer(settings: Settings) -> SegmentWriter:
    make_folder(settings.state)
    return SegmentWriter(folder_of(settings), _own(settings))


def _own(settings: Settings) -> SegmentSettings:
    log = settings.log
    return log if isinstance(log, SegmentSettings) else SegmentSettings(**log.model_dump(exclude={"kind"}))


def _open_reader(settings: Settings) -> SegmentReader:
    return SegmentReader(folder_of(settings))


KIND = LogKind("segments", SegmentSettings, _open_writer, _open_reader)

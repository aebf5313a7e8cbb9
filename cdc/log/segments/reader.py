"""Reading the segment log: any number of readers, in any process, while the writer writes and merges.

An offset is a sequence number. A merged segment records where each original entry begins, so every offset stays valid.
If a merge removes a file during a read, the reader finds the rows in the merged segment.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.errors import ChangesRemoved, LogCorrupt
from cdc.log.segments import segment_file
from cdc.log.segments.bucket.storage import BucketStorage
from cdc.log.segments.consumers import ConsumerPosition, Consumers
from cdc.log.segments.folder.storage import FolderStorage
from cdc.log.segments.merge import recover_marks
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.segment_names import after as after_sequence
from cdc.log.segments.storage import LogLocation, LogStorage, StoredSegment, View
from cdc.log.spark_reader import SparkReader
from cdc.model import LOG_SCHEMA, ZERO_LSN, Lsn
from cdc.ports import Consumer, Lag, Offset, Schemas, Share, Slice

if TYPE_CHECKING:
    from cdc.log.spark.source import LogSource

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_MISSES = 20


def offset_of(sequence: int) -> Offset:
    """A sequence number as an offset of this log."""
    return Offset(str(sequence))


def sequence_of(offset: Offset) -> int:
    """The sequence number of an offset. Raises ValueError on an offset of another kind of log."""
    if not offset.isdecimal():
        raise ValueError(f"{offset!r} is not an offset of a segment log; it is a sequence number, for instance 42.")
    return int(offset)


class SegmentReader(SparkReader):
    """Reads one log."""

    def __init__(self, storage: LogStorage) -> None:
        self.storage = storage
        """Where the log is."""
        self._consumers = Consumers(storage.consumers)

    @property
    def schemas(self) -> Schemas:
        """The schema registry of this log."""
        return self.storage.schemas

    @property
    def poll_seconds(self) -> float:
        """That of the folder or the bucket."""
        return self.storage.poll_seconds

    def view(self) -> View:
        """The segments now."""
        return self.storage.view()

    def start(self) -> Offset:
        """The offset before the oldest retained entry."""
        return offset_of(self.view().chain.before)

    def removed(self) -> Lsn:
        """The LSN up to which retention has removed changes."""
        floor = self.view().chain.floor
        return floor.end if floor is not None else ZERO_LSN

    def head(self) -> tuple[Offset, Lsn]:
        """The offset after the newest entry, and the LSN up to which the log is complete there."""
        chain = self.view().chain
        return offset_of(chain.head), chain.end

    def marks(self) -> Mapping[str, str]:
        """The newest value of every mark."""
        return recover_marks(self.view())

    def seek(self, point: Lsn | datetime) -> Offset:
        """The last offset that is before every change at or after the given time, or after the given LSN."""
        view = self.view()
        if isinstance(point, datetime):
            moment = (point - _EPOCH) // timedelta(microseconds=1)
            cut = _first_entry(view, lambda item: item.newest >= moment, 0)
        else:
            lsn = point
            low = bisect_right(view.chain.kept, lsn, key=lambda segment: segment.end)
            cut = _first_entry(view, lambda item: item.end > lsn, low)
        return offset_of(view.chain.head if cut is None else cut.sequence - 1)

    def read(self, after: Offset, until: Offset | None = None) -> Iterator[Slice]:
        """Slices after an offset. A transaction is always one slice, even if larger than memory: use `frame` then."""
        position, view = sequence_of(after), self.view()
        head = view.chain.head
        if position > head:
            raise LogCorrupt(
                f"Offset {position} is beyond the end of the log ({head}).",
                "The offset belongs to another log: start from the log's first offset, or seek by LSN.",
            )
        stop = head if until is None else min(head, sequence_of(until))
        misses = 0
        while position < stop:
            try:
                for piece in _slices_between(view, position, stop):
                    yield piece
                    position, misses = sequence_of(piece.offset), 0
            except FileNotFoundError as error:
                # A merge removed the file after the listing: the next listing shows the merged segment.
                misses += 1
                if misses > _MAX_MISSES:
                    raise segment_file.corrupt(str(error.filename), "is listed but cannot be found") from None
                view = self.view()

    def consumers(self) -> Sequence[Consumer]:
        """Every registered consumer."""
        return [
            Consumer(item.name, offset_of(item.sequence), item.reached, item.at, item.sequence)
            for item in self._consumers.all()
        ]

    def lags(self) -> Sequence[Lag]:
        """How far each registered consumer is behind the head."""
        view, now = self.view(), datetime.now(UTC)
        return [_lag(item, view, now) for item in self._consumers.all()]

    def commit(self, consumer: str, reached: Lsn, offset: Offset | None = None) -> None:
        """Record how far a consumer has applied the log."""
        if offset is not None:
            self._consumers.commit(consumer, sequence_of(offset), reached)
            return
        view = self.view()
        low = bisect_left(view.chain.kept, reached, key=lambda segment: segment.end)
        cut = _first_entry(view, lambda item: item.end >= reached, low)
        self._consumers.commit(consumer, view.chain.head if cut is None else _read_up_to(cut, reached), reached)

    def forget(self, consumer: str) -> None:
        """Unregister a consumer: retention no longer keeps changes for it."""
        self._consumers.forget(consumer)

    def read_share(self, share: Share) -> Iterator[pa.Table]:
        """The changes of a share, a row group at a time."""
        from cdc.log.spark.splits import read_share

        return read_share(self, share)

    def reached(self, offset: Offset) -> Lsn:
        """The end of the entry with this sequence number."""
        view, position = self.view(), sequence_of(offset)
        if position <= view.chain.before:
            return self.removed()
        segment = next(iter(after_sequence(view.chain.kept, position - 1)))
        return next(cut.end for cut in cuts_of(view, segment) if cut.sequence >= position)

    def source(self) -> "LogSource":
        """The segments as a Spark source."""
        from cdc.log.spark.segments import source

        return source(self.storage.location)


@cache
def storage_at(location: LogLocation) -> LogStorage:
    """The folder or bucket at a location, opened once in each process."""
    return BucketStorage(location) if location.in_bucket else FolderStorage(Path(location.root))


def require_kept(view: View, position: int) -> None:
    """Raise if retention removed changes after this position: reading on would skip them silently."""
    if position < view.chain.before:
        raise ChangesRemoved(
            f"Retention removed the changes after offset {position}; the oldest offset is {view.chain.before}.",
            "Take a new snapshot for this reader, and register it before it reads.",
        )


def cuts_of(view: View, segment: Segment) -> Sequence[segment_file.Cut]:
    """Where the original entries lie in a segment. Opens the file only if the segment is merged."""
    if segment.start == segment.stop:
        return (segment_file.Cut(segment.stop, segment.end, segment.rows, segment.newest),)
    return segment_file.metadata(view.stored[segment], segment).cuts


def _first_entry(view: View, wanted: Callable[[segment_file.Cut], bool], low: int) -> segment_file.Cut | None:
    """The first wanted entry. Opens at most one file: the merged segment that has the entry."""
    for segment in view.chain.kept[low:]:
        if wanted(segment_file.Cut(segment.stop, segment.end, segment.rows, segment.newest)):
            return next((cut for cut in cuts_of(view, segment) if wanted(cut)), None)
    return None


def _slices_between(view: View, position: int, stop: int) -> Iterator[Slice]:
    require_kept(view, position)
    for segment in after_sequence(view.chain.kept, position):
        if segment.start > stop:
            return
        yield from slices(view.stored[segment], segment, position, stop)


def slices(stored: StoredSegment, segment: Segment, position: int, stop: int) -> Iterator[Slice]:
    """The entries of one segment after a position, up to a sequence number."""
    if segment.start == segment.stop:
        yield Slice(offset_of(segment.stop), segment.end, segment_file.rows(stored, segment))
        return
    cuts = segment_file.metadata(stored, segment).cuts
    wanted = [cut for cut in cuts if position < cut.sequence <= stop]
    skipped = sum(cut.rows for cut in cuts if cut.sequence <= position)
    source = segment_file.batches(stored, segment, skipped, skipped + sum(cut.rows for cut in wanted))
    pending = LOG_SCHEMA.empty_table()
    for cut in wanted:
        while pending.num_rows < cut.rows:
            more = next(source, None)
            if more is None:
                raise segment_file.corrupt(stored.name, "has fewer rows than its metadata says")
            pending = pa.concat_tables([pending, more])
        yield Slice(offset_of(cut.sequence), cut.end, pending.slice(0, cut.rows))
        pending = pending.slice(cut.rows)


def _read_up_to(cut: segment_file.Cut, reached: Lsn) -> int:
    return cut.sequence if cut.end == reached else cut.sequence - 1


def _lag(item: ConsumerPosition, view: View, now: datetime) -> Lag:
    unread = [segment for segment in view.chain.kept if segment.stop > item.sequence]
    entries = sum(segment.stop - max(segment.start - 1, item.sequence) for segment in unread)
    oldest = next((segment.newest for segment in unread if segment.newest), None)
    seconds = 0.0 if oldest is None else max((now - _EPOCH).total_seconds() - oldest / 1e6, 0.0)
    return Lag(item.name, max(view.chain.end - item.reached, 0), max(entries, 0), seconds)

"""Reading the segment log: any number of readers, in any process, while the writer writes and merges.

An offset is a sequence number. Merged segments keep where each original entry lies, so an offset in the middle of one
stays good for ever; a file that a merge takes away while it is read is found again in its successor.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.errors import LogCorrupt
from cdc.log.segments import segment_file
from cdc.log.segments.consumers import ConsumerPosition, Consumers
from cdc.log.segments.folder import LogFolder, View
from cdc.log.segments.schemas import FolderSchemas
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.segment_names import after as after_sequence
from cdc.model import LOG_SCHEMA, ZERO_LSN, Lsn, TableId
from cdc.ports import Consumer, Lag, Offset, Schemas, Slice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cdc.log.spark.source import LogSource

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MISSES = 20


def offset_of(sequence: int) -> Offset:
    """A sequence number as the outside sees it."""
    return Offset(str(sequence))


def sequence_of(offset: Offset) -> int:
    """The sequence number of an offset of ours; ValueError on another log's."""
    if not offset.isdecimal():
        raise ValueError(f"{offset!r} is not an offset of a segment log; it is a sequence number, for instance 42.")
    return int(offset)


class SegmentReader:
    """Reads one folder. Cheap to make; keeps a listing as long as the folder does not change."""

    def __init__(self, root: Path) -> None:
        self._folder = LogFolder(root)
        self._schemas = FolderSchemas(root / "schemas")
        self._consumers = Consumers(root / "consumers")

    @property
    def schemas(self) -> Schemas:
        """The registry kept with this log."""
        return self._schemas

    def view(self) -> View:
        """The segments as they lie now."""
        return self._folder.view()

    def start(self) -> Offset:
        """Before the oldest entry that is kept."""
        return offset_of(self.view().chain.before)

    def removed(self) -> Lsn:
        """The LSN up to which retention has removed changes."""
        floor = self.view().chain.floor
        return floor.end if floor is not None else ZERO_LSN

    def head(self) -> tuple[Offset, Lsn]:
        """After the newest entry, and the LSN it brings a reader to."""
        chain = self.view().chain
        return offset_of(chain.head), chain.end

    def seek(self, point: Lsn | datetime) -> Offset:
        """The last offset before which nothing lies that the point asks for."""
        view = self.view()
        if isinstance(point, datetime):
            moment = (point - _EPOCH) // timedelta(microseconds=1)
            cut = _first(view, lambda item: item.newest >= moment, 0)
        else:
            lsn = point
            low = bisect_right(view.chain.kept, lsn, key=lambda segment: segment.end)
            cut = _first(view, lambda item: item.end > lsn, low)
        return offset_of(view.chain.head if cut is None else cut.sequence - 1)

    def read(self, after: Offset, until: Offset | None = None) -> Iterator[Slice]:
        """Slices after an offset. A transaction larger than memory is one slice too: use `frame` for those."""
        position, head = sequence_of(after), self.view().chain.head
        if position > head:
            raise LogCorrupt(
                f"Offset {position} is beyond the end of the log ({head}).",
                "It belongs to another log: start again from `start` or a position by LSN.",
            )
        stop = head if until is None else min(head, sequence_of(until))
        misses = 0
        while position < stop:
            try:
                for piece in self._slices(position, stop):
                    yield piece
                    position, misses = sequence_of(piece.offset), 0
            except FileNotFoundError as error:
                # Merged away between the listing and the opening: the next listing shows its successor.
                misses += 1
                if misses > _MISSES:
                    raise segment_file.corrupt(Path(error.filename or "?"), "comes and goes") from None

    def _slices(self, position: int, stop: int) -> Iterator[Slice]:
        view = self.view()
        require_kept(view, position)
        for segment in after_sequence(view.chain.kept, position):
            if segment.start > stop:
                return
            yield from slices(view.places[segment], segment, position, stop)

    def consumers(self) -> Sequence[Consumer]:
        """Every registered reader."""
        return [
            Consumer(item.name, offset_of(item.sequence), item.reached, item.at, item.sequence)
            for item in self._consumers.all()
        ]

    def lags(self) -> Sequence[Lag]:
        """How far each registered reader is behind the head."""
        view, now = self.view(), datetime.now(UTC)
        return [_lag(item, view, now) for item in self._consumers.all()]

    def commit(self, consumer: str, reached: Lsn, offset: Offset | None = None) -> None:
        """Record how far a reader has applied the log."""
        if offset is not None:
            self._consumers.commit(consumer, sequence_of(offset), reached)
            return
        view = self.view()
        low = bisect_left(view.chain.kept, reached, key=lambda segment: segment.end)
        cut = _first(view, lambda item: item.end >= reached, low)
        self._consumers.commit(consumer, view.chain.head if cut is None else _read_up_to(cut, reached), reached)

    def forget(self, consumer: str) -> None:
        """Release what retention keeps for this reader."""
        self._consumers.forget(consumer)

    def frame(self, spark: "SparkSession", after: Offset | None = None, limit: int = 0) -> "DataFrame":
        """A streaming DataFrame of the log."""
        return self._source().frame(spark, self.start() if after is None else after, limit)

    def packed(
        self, spark: "SparkSession", after: Offset | None, limit: int, columns: Sequence[str], tables: Sequence[TableId]
    ) -> "DataFrame":
        """The micro-batches of `frame`, of some columns and tables (none: all), for `unpacked` only."""
        return self._source().packed(spark, self.start() if after is None else after, limit, columns, tables)

    def unpacked(self, batch: "DataFrame") -> "pa.Table | DataFrame":
        """The rows of a packed micro-batch; a DataFrame of LOG_SCHEMA where they are too many to hold."""
        return self._source().unpacked(batch)

    def _source(self) -> "LogSource":
        from cdc.log.spark.segments import source

        return source(self._folder.root)


def require_kept(view: View, position: int) -> None:
    """Raise if what follows a position was removed: going on would skip changes in silence."""
    if position < view.chain.before:
        raise LogCorrupt(
            f"What follows offset {position} was removed by retention; the oldest offset is {view.chain.before}.",
            "Take a new snapshot for this reader, and register it before it reads.",
        )


def cuts_of(view: View, segment: Segment) -> Sequence[segment_file.Cut]:
    """Where the original entries lie in a segment; only merged ones must be opened for that."""
    if segment.start == segment.stop:
        return (segment_file.Cut(segment.stop, segment.end, segment.rows, segment.newest),)
    return segment_file.facts(view.places[segment], segment).cuts


def _first(view: View, wanted: Callable[[segment_file.Cut], bool], low: int) -> segment_file.Cut | None:
    """The first entry that is wanted, opening at most the one merged segment that holds it."""
    for segment in view.chain.kept[low:]:
        if wanted(segment_file.Cut(segment.stop, segment.end, segment.rows, segment.newest)):
            return next((cut for cut in cuts_of(view, segment) if wanted(cut)), None)
    return None


def slices(place: Path, segment: Segment, position: int, stop: int) -> Iterator[Slice]:
    """The entries of one segment after a position, up to a sequence number."""
    if segment.start == segment.stop:
        yield Slice(offset_of(segment.stop), segment.end, segment_file.rows(place, segment))
        return
    cuts = segment_file.facts(place, segment).cuts
    wanted = [cut for cut in cuts if position < cut.sequence <= stop]
    skipped = sum(cut.rows for cut in cuts if cut.sequence <= position)
    source = segment_file.batches(place, segment, skipped, skipped + sum(cut.rows for cut in wanted))
    held = LOG_SCHEMA.empty_table()
    for cut in wanted:
        while held.num_rows < cut.rows:
            more = next(source, None)
            if more is None:
                raise segment_file.corrupt(place, "ends before the rows that it promises")
            held = pa.concat_tables([held, more])
        yield Slice(offset_of(cut.sequence), cut.end, held.slice(0, cut.rows))
        held = held.slice(cut.rows)


def _read_up_to(cut: segment_file.Cut, reached: Lsn) -> int:
    return cut.sequence if cut.end == reached else cut.sequence - 1


def _lag(item: ConsumerPosition, view: View, now: datetime) -> Lag:
    unread = [segment for segment in view.chain.kept if segment.stop > item.sequence]
    entries = sum(segment.stop - max(segment.start - 1, item.sequence) for segment in unread)
    oldest = next((segment.newest for segment in unread if segment.newest), None)
    seconds = 0.0 if oldest is None else max((now - _EPOCH).total_seconds() - oldest / 1e6, 0.0)
    return Lag(item.name, max(view.chain.end - item.reached, 0), max(entries, 0), seconds)

"""Readers of a Kafka log: whole transactions, by the markers of the position topic."""

import threading
from collections.abc import Iterator, Sequence
from datetime import datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.log.kafka.consumers import lag_of
from cdc.log.kafka.position import EPOCH, MARKER_KEY, KafkaPosition, TopicExtent
from cdc.log.kafka.read.between import check, distance, ranges
from cdc.log.kafka.read.ranges import RangeRows, envelopes
from cdc.log.kafka.read.topic_reader import TopicReader
from cdc.log.kafka.removed import removed
from cdc.log.kafka.schemas import KafkaSchemas
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.topic_tail import TopicTail
from cdc.model import LOG_SCHEMA, Lsn
from cdc.ports import Lag, Offset, Schemas, Slice

_READ_MESSAGES = 50_000
"""Messages read at once, whatever the size of the entries."""
_KEPT_MARKERS = 50_000
"""Markers held in memory; beyond this every second of the older half is forgotten, which only makes slices longer."""


class KafkaReader(TopicReader):
    """Reads what our own writer wrote."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings, envelopes)
        self._tail = TopicTail(self._cluster, settings.system_topic("position"))
        self._schemas = KafkaSchemas(TopicTail(self._cluster, settings.system_topic("schemas")))
        self._places: list[KafkaPosition] = []
        self._lock = threading.RLock()

    @property
    def schemas(self) -> Schemas:
        """The registry kept with this log."""
        return self._schemas

    def removed(self) -> Lsn:
        """The LSN up to which changes were removed from the topics."""
        return removed(self._cluster, self.newest(), self.places())

    def newest(self) -> KafkaPosition:
        """The newest marker as a place."""
        places = self.places()
        return places[-1] if places else KafkaPosition()

    def seek(self, point: Lsn | datetime) -> Offset:
        """The last marker before the point; markers older than some hours are an hour apart."""
        micros = int((point - EPOCH).total_seconds() * 1_000_000) if isinstance(point, datetime) else 0
        found = KafkaPosition()
        for place in self.places():
            if (place.newest >= micros) if isinstance(point, datetime) else (place.end > point):
                break
            found = place
        return found.offset()

    def read(self, after: Offset, until: Offset | None = None) -> Iterator[Slice]:
        """Slices of about fifty thousand messages, cut between transactions only."""
        before = KafkaPosition.of(after)
        last = KafkaPosition.of(until) if until is not None else self.newest()
        while before.marker < last.marker:
            place = self.next_place(before, _READ_MESSAGES)
            if place.marker > last.marker or place is before:
                place = last
            between = [each for each in self.places() if before.marker < each.marker < place.marker]
            yield from self._slices(before, [*between, place])
            before = place

    def _slices(self, after: KafkaPosition, places: Sequence[KafkaPosition]) -> Iterator[Slice]:
        """Read up to the last of these places at once, and cut at each."""
        check(self._cluster, after, places[-1])
        parts = self._ranges.read(ranges(after, places[-1]))
        rows = pa.concat_tables([LOG_SCHEMA.empty_table(), *(part.rows for part in parts)])
        which = np.concatenate([np.zeros(0, np.int64), *(_entries(part, places) for part in parts)])
        numbers = np.concatenate([np.zeros(0, np.int64), *(part.numbers for part in parts)])
        ordered = rows.take(np.lexsort((numbers, which)))
        cuts = np.searchsorted(np.sort(which), np.arange(len(places) + 1))
        for at, place in enumerate(places):
            yield Slice(place.offset(), place.end, ordered.slice(int(cuts[at]), int(cuts[at + 1] - cuts[at])))

    def lags(self) -> Sequence[Lag]:
        """How far each registered reader is behind the head."""
        places = self.places()
        return [lag_of(consumer, places) for consumer in self.consumers()]

    def commit(self, consumer: str, reached: Lsn, offset: Offset | None = None) -> None:
        """Record how far a reader is."""
        if offset is not None:
            self._consumers.commit(consumer, reached, offset)
            return
        found = KafkaPosition()
        for place in self.places():
            if place.end <= reached:
                found = place
            if place.end >= reached:
                break
        self._consumers.commit(consumer, reached, found.offset())

    def close(self) -> None:
        """Let go of the connections."""
        self._tail.close()
        super().close()

    def places(self) -> Sequence[KafkaPosition]:
        """Every marker that is kept, oldest first."""
        with self._lock:
            for message in self._tail.drain():
                if message.key.startswith(MARKER_KEY) and message.value is not None:
                    self._places.append(KafkaPosition.decoded(message.offset, message.value))
            if len(self._places) > _KEPT_MARKERS:
                half = _KEPT_MARKERS // 2
                self._places = self._places[:half:2] + self._places[half:]
            return self._places

    def next_place(self, after: KafkaPosition, messages: int) -> KafkaPosition:
        """The furthest marker within so many messages, at least one marker on; `after` itself at the head."""
        found = after
        for place in self.places():
            if place.marker <= after.marker:
                continue
            if found is not after and distance(after, place) > messages:
                break
            found = place
        return found


def _entries(part: RangeRows, places: Sequence[KafkaPosition]) -> npt.NDArray[np.int64]:
    """Which of the places each row of a part belongs to: the first that ends beyond its offset."""
    none = TopicExtent("", (0,) * (part.range.partition + 1))
    ends = [place.topics.get(part.range.topic, none).ends[part.range.partition] for place in places]
    return np.searchsorted(np.array(ends, np.int64), part.offsets, side="right")

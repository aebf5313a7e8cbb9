"""Reads a Kafka log in whole transactions, by the markers of the position topic."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.log.kafka.consumers import lag_of
from cdc.log.kafka.position import EPOCH, MARK_KEY, MARKER_KEY, KafkaPosition, TopicExtent
from cdc.log.kafka.read.ranges import RangeRows, check_topics, decode_envelopes, messages_between, ranges_between
from cdc.log.kafka.read.topic_reader import TopicReader
from cdc.log.kafka.retention import removed_until
from cdc.log.kafka.schemas import KafkaSchemas
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.topic_tail import TopicTail
from cdc.model import LOG_SCHEMA, Lsn
from cdc.ports import Lag, Offset, Schemas, Slice

_READ_MESSAGES = 50_000
"""Messages read at once."""
_KEPT_MARKERS = 50_000
"""Markers in memory; beyond this every second one of the older half is dropped, which only makes slices longer."""


class KafkaReader(TopicReader):
    """Reads the topics that KafkaWriter writes."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings, decode_envelopes)
        self._tail = TopicTail(self._cluster, settings.system_topic("position"))
        self._schemas = KafkaSchemas(TopicTail(self._cluster, settings.system_topic("schemas")))
        self._positions: list[KafkaPosition] = []
        self._marks: dict[str, str] = {}
        self._lock = threading.RLock()

    @property
    def schemas(self) -> Schemas:
        """The schema registry of this log."""
        return self._schemas

    def removed(self) -> Lsn:
        """The LSN up to which Kafka has removed changes."""
        return removed_until(self._cluster, self.newest(), self.positions())

    def marks(self) -> Mapping[str, str]:
        """The newest value of every mark."""
        self.positions()
        return dict(self._marks)

    def newest(self) -> KafkaPosition:
        """The newest marker."""
        positions = self.positions()
        return positions[-1] if positions else KafkaPosition()

    def seek(self, point: Lsn | datetime) -> Offset:
        """The last marker before the point. Markers older than some hours are an hour apart."""
        micros = int((point - EPOCH).total_seconds() * 1_000_000) if isinstance(point, datetime) else 0
        found = KafkaPosition()
        for position in self.positions():
            if (position.newest >= micros) if isinstance(point, datetime) else (position.end > point):
                break
            found = position
        return found.offset()

    def read(self, after: Offset, until: Offset | None = None) -> Iterator[Slice]:
        """Slices of whole transactions, read about 50,000 messages at a time."""
        before = KafkaPosition.of(after)
        last = KafkaPosition.of(until) if until is not None else self.newest()
        while before.marker < last.marker:
            position = self.next_position(before, _READ_MESSAGES)
            if position.marker > last.marker or position is before:
                position = last
            between = [each for each in self.positions() if before.marker < each.marker < position.marker]
            yield from self._slices(before, [*between, position])
            before = position

    def _slices(self, after: KafkaPosition, positions: Sequence[KafkaPosition]) -> Iterator[Slice]:
        """Read up to the last of these positions at once; one slice per position."""
        check_topics(self._cluster, after, positions[-1])
        parts = self._ranges.read(ranges_between(after, positions[-1]))
        rows = pa.concat_tables([LOG_SCHEMA.empty_table(), *(part.rows for part in parts)])
        which = np.concatenate([np.zeros(0, np.int64), *(_position_indexes(part, positions) for part in parts)])
        numbers = np.concatenate([np.zeros(0, np.int64), *(part.numbers for part in parts)])
        ordered = rows.take(np.lexsort((numbers, which)))
        cuts = np.searchsorted(np.sort(which), np.arange(len(positions) + 1))
        for at, position in enumerate(positions):
            yield Slice(position.offset(), position.end, ordered.slice(int(cuts[at]), int(cuts[at + 1] - cuts[at])))

    def lags(self) -> Sequence[Lag]:
        """How far each registered consumer is behind the head."""
        positions = self.positions()
        return [lag_of(consumer, positions) for consumer in self.consumers()]

    def commit(self, consumer: str, reached: Lsn, offset: Offset | None = None) -> None:
        """Record how far a consumer has applied the log."""
        if offset is not None:
            self._consumers.commit(consumer, reached, offset)
            return
        found = KafkaPosition()
        for position in self.positions():
            if position.end <= reached:
                found = position
            if position.end >= reached:
                break
        self._consumers.commit(consumer, reached, found.offset())

    def close(self) -> None:
        """Close the connections."""
        self._tail.close()
        super().close()

    def positions(self) -> Sequence[KafkaPosition]:
        """Every retained marker, oldest first."""
        with self._lock:
            for message in self._tail.drain():
                if message.value is None:
                    continue
                if message.key.startswith(MARKER_KEY):
                    self._positions.append(KafkaPosition.decoded(message.offset, message.value))
                elif message.key.startswith(MARK_KEY):
                    self._marks[message.key.removeprefix(MARK_KEY).decode()] = message.value.decode()
            if len(self._positions) > _KEPT_MARKERS:
                half = _KEPT_MARKERS // 2
                self._positions = self._positions[:half:2] + self._positions[half:]
            return self._positions

    def next_position(self, after: KafkaPosition, messages: int) -> KafkaPosition:
        """The last marker within so many messages, at least the next one; `after` itself at the head."""
        found = after
        for position in self.positions():
            if position.marker <= after.marker:
                continue
            if found is not after and messages_between(after, position) > messages:
                break
            found = position
        return found


def _position_indexes(part: RangeRows, positions: Sequence[KafkaPosition]) -> npt.NDArray[np.int64]:
    """The index of the position that each row belongs to: the first one that ends beyond its offset."""
    none = TopicExtent("", (0,) * (part.range.partition + 1))
    ends = [position.topics.get(part.range.topic, none).ends[part.range.partition] for position in positions]
    return np.searchsorted(np.array(ends, np.int64), part.offsets, side="right")

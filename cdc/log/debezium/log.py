"""Reads the topics of a Debezium connector as a log. Read only.

Position, order and completeness are the connector's. See docs/kafka.md for the connector settings that are needed, and
docs/debezium-differences.md for what its messages do not contain.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.settings import Settings
from cdc.errors import ConfigError
from cdc.log.debezium.decode import PLACEHOLDER, DebeziumDecoder
from cdc.log.debezium.schemas import DebeziumSchemas
from cdc.log.debezium.seek import offset_before
from cdc.log.kafka.admin import PartitionOffsets, Topic
from cdc.log.kafka.client import check_brokers
from cdc.log.kafka.consumers import lag_of
from cdc.log.kafka.envelope.encode import join_table, topic_of
from cdc.log.kafka.position import EPOCH, KafkaPosition, TopicExtent, topics_of
from cdc.log.kafka.read.ranges import OffsetRange, RangeRows, check_topics, messages_between, ranges_between
from cdc.log.kafka.read.topic_reader import TopicReader
from cdc.log.kafka.retention import removed_until
from cdc.log.kafka.schemas import KafkaSchemas
from cdc.log.kafka.settings import KafkaConnectionSettings
from cdc.log.kafka.topic_tail import TopicTail
from cdc.log.kafka.topics import COMPACTED
from cdc.log.registry import LogKind
from cdc.model import LOG_SCHEMA, Lsn, TableId
from cdc.ports import Lag, LogWriter, Offset, Schemas, Slice

_READ_MESSAGES = 50_000
_SAMPLED = 200
_LAST_RECORDS = 4
"""The last message of a partition may be a tombstone, and invisible records may follow it."""


class DebeziumSettings(KafkaConnectionSettings):
    """Topics of a Debezium connector; `prefix` is its `topic.prefix`."""

    kind: Literal["debezium"] = "debezium"
    placeholder: str = PLACEHOLDER
    """The connector's `unavailable.value.placeholder`."""


class DebeziumReader(TopicReader):
    """Reads every topic `<prefix>.<schema>.<table>`. Not for two threads at once."""

    def __init__(self, settings: DebeziumSettings) -> None:
        self._settings = settings
        decoder = DebeziumDecoder(settings.placeholder)
        super().__init__(settings, decoder)
        kept = KafkaSchemas(TopicTail(self._cluster, settings.system_topic("schemas"), transactional=False))
        self._schemas = DebeziumSchemas(kept, self._publish_schema, self._sample, decoder.declared)
        self._newest = KafkaPosition()
        self._lock = threading.RLock()

    @property
    def schemas(self) -> Schemas:
        """Stored schemas; else the columns that messages declare; else a guess from the row images."""
        return self._schemas

    def removed(self) -> Lsn:
        """1 if Kafka has removed the connector's first messages (the LSN up to which is unknown), else 0."""
        return removed_until(self._cluster, self.newest(), ())

    def marks(self) -> Mapping[str, str]:
        """None: a connector writes none."""
        return {}

    def newest(self) -> KafkaPosition:
        """The end of every partition. `end` is the last commit before the newest change read."""
        with self._lock:
            known = self._newest
            topics = self._cluster.admin.topics(self._topics())
            extents = _extents(topics, self._cluster.admin.ends(topics.values(), committed=True))
            if extents != known.topics:
                position = KafkaPosition(_message_count(extents), known.end, known.newest, extents)
                self._newest = self._completed(known, position)
            return self._newest

    def next_position(self, after: KafkaPosition, messages: int) -> KafkaPosition:
        """The head; if that is too far, each partition advances by its share, and `end` does not move."""
        newest = self.newest()
        distance = messages_between(after, newest)
        if distance <= messages:
            return newest
        extents = {}
        for name, extent in newest.topics.items():
            known = after.topics.get(name, TopicExtent(extent.id, (0,) * len(extent.ends)))
            steps = zip(known.ends, extent.ends, strict=True)
            ends = tuple(start + -(-(end - start) * messages // distance) for start, end in steps)
            extents[name] = TopicExtent(extent.id, ends)
        return KafkaPosition(_message_count(extents), after.end, after.newest, extents)

    def seek(self, point: Lsn | datetime) -> Offset:
        """For an LSN a binary search in each partition, at most one transaction early; for a time Kafka's index."""
        newest = self.newest()
        topics = topics_of(newest)
        if isinstance(point, datetime):
            moment = int((point - EPOCH).total_seconds() * 1000)
            found = self._cluster.admin.offsets_at(topics, moment)
            ends = {
                position: newest.topics[position[0]].ends[position[1]] if at < 0 else at
                for position, at in found.items()
            }
        else:
            whole = (
                OffsetRange(*position, low, newest.topics[position[0]].ends[position[1]])
                for position, low in self._cluster.admin.starts(topics).items()
            )
            ends = {(each.topic, each.partition): offset_before(self._ranges.read, each, point) for each in whole}
        extents = _extents({topic.name: topic for topic in topics}, ends)
        return KafkaPosition(_message_count(extents), Lsn(0), 0, extents).offset()

    def read(self, after: Offset, until: Offset | None = None) -> Iterator[Slice]:
        """Slices of about 50,000 messages. Within a partition the order is the connector's."""
        before = KafkaPosition.of(after)
        last = KafkaPosition.of(until) if until is not None else self.newest()
        while before.marker < last.marker:
            position = self.next_position(before, _READ_MESSAGES)
            position = last if position.marker >= last.marker else position
            yield Slice(position.offset(), position.end, self._rows(before, position))
            before = position

    def lags(self) -> Sequence[Lag]:
        """How far each registered consumer is behind. The number of entries is unknown."""
        newest = self.newest()
        return [lag_of(consumer, [newest]) for consumer in self.consumers()]

    def commit(self, consumer: str, reached: Lsn, offset: Offset | None = None) -> None:
        """Record how far a consumer has applied the log. The retention of the connector's topics ignores it."""
        self._ensure("consumers")
        self._consumers.commit(consumer, reached, self.start() if offset is None else offset)

    def _topics(self) -> list[str]:
        """The topics of tables: the connector's internal ones have fewer parts, the log's own begin with `millrace`."""
        head = self._settings.prefix + "."
        names = (name for name in self._cluster.admin.names() if name.startswith(head))
        return [name for name in names if name.count(".") >= 2 and not name.startswith(head + "millrace.")]

    def _rows(self, after: KafkaPosition, until: KafkaPosition) -> pa.Table:
        check_topics(self._cluster, after, until)
        parts = self._ranges.read(ranges_between(after, until))
        rows = pa.concat_tables([LOG_SCHEMA.empty_table(), *(part.rows for part in parts)])
        return rows.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])

    def _completed(self, before: KafkaPosition, position: KafkaPosition) -> KafkaPosition:
        """The position with LSN and time taken from the last records of the partitions that grew."""
        starts = self._cluster.admin.starts(topics_of(position))
        moved = [
            OffsetRange(item.topic, item.partition, max(item.start or 0, item.end - _LAST_RECORDS, low), item.end)
            for item in ranges_between(before, position)
            if (low := starts[item.topic, item.partition]) < item.end
        ]
        parts = self._ranges.read(moved)
        end = max([int(before.end), *(_greatest(part, "commit_lsn") for part in parts)])
        newest = max([before.newest, *(_greatest(part, "commit_ts") for part in parts)])
        return KafkaPosition(position.marker, Lsn(end), newest, position.topics)

    def _sample(self, table: TableId) -> Iterable[Mapping[str, object]]:
        """The last and the first messages of a table's topic."""
        name = topic_of(self._settings.prefix, join_table(table.schema, table.name))
        newest = self.newest()
        extent = newest.topics.get(name)
        starts = self._cluster.admin.starts(topics_of(newest))
        for partition, end in enumerate(extent.ends if extent else ()):
            low = starts[name, partition]
            for start, stop in ((max(low, end - _SAMPLED), end), (low, min(low + _SAMPLED, end)), (low, end)):
                for part in self._ranges.read([OffsetRange(name, partition, start, stop)]):
                    yield from part.rows.to_pylist()

    def _ensure(self, name: str) -> None:
        topic = self._settings.system_topic(name)
        if topic not in self._cluster.admin.topics([topic]):
            self._cluster.admin.create(topic, 1, -1, COMPACTED)

    def _publish_schema(self, key: bytes, value: bytes) -> None:
        self._ensure("schemas")
        self._cluster.publish(self._settings.system_topic("schemas"), key, value)


def _extents(topics: Mapping[str, Topic], ends: PartitionOffsets) -> dict[str, TopicExtent]:
    return {
        name: TopicExtent(topic.id, tuple(ends[name, partition] for partition in range(topic.partitions)))
        for name, topic in topics.items()
    }


def _message_count(extents: Mapping[str, TopicExtent]) -> int:
    """The number of messages before a position, which orders the positions of one log."""
    return sum(sum(extent.ends) for extent in extents.values())


def _greatest(part: RangeRows, column: str) -> int:
    return int(np.max(pc.cast(part.rows.column(column), pa.int64()).to_numpy()))


def _open_writer(settings: Settings) -> LogWriter:
    raise ConfigError(
        "A log of kind debezium is written by its connector.", "Run only the apply process, or set log.kind to kafka."
    )


def _debezium_settings(settings: Settings) -> DebeziumSettings:
    if not isinstance(settings.log, DebeziumSettings):
        raise ConfigError("The log's settings are not those of Debezium topics.", "Set log.kind to debezium.")
    return settings.log


def _open_reader(settings: Settings) -> DebeziumReader:
    return DebeziumReader(_debezium_settings(settings))


def _check_brokers(settings: Settings, seconds: float) -> None:
    check_brokers(_debezium_settings(settings), seconds)


KIND = LogKind(DebeziumSettings, _open_writer, _open_reader, _check_brokers)

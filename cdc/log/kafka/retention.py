"""Retention by age and size of messages that every registered consumer has read.

Kafka's own retention does not know the log's consumers, so topics are created without it.
"""

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cdc.log.kafka.admin import PartitionOffsets
from cdc.log.kafka.client import Cluster
from cdc.log.kafka.consumers import ConsumerPositions
from cdc.log.kafka.position import EPOCH, MARKER_KEY, KafkaPosition, topics_of
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.topic_tail import Message, TopicTail
from cdc.log.kafka.topics import SEGMENT_BYTES
from cdc.model import ZERO_LSN, Lsn

_MAX_MARKERS = 1000
"""Markers in memory; beyond this every second one is dropped, which only makes the steps of removal larger."""
_MAX_PAUSE_SECONDS = 600.0
_UNKNOWN_LSN = Lsn(1)
"""Kafka removed changes, and no retained marker says up to where."""


class TopicRetention:
    """Follows the position markers and deletes the records before one of them. Leaves compacted topics to Kafka."""

    def __init__(self, settings: KafkaSettings, cluster: Cluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._tail = TopicTail(cluster, settings.system_topic("position"), created=True)
        self._consumers = ConsumerPositions(cluster, created=True)
        self._markers: list[Message] = []
        self._pause = min(_MAX_PAUSE_SECONDS, settings.retention_hours * 36)
        self._due = 0.0
        self._lock = threading.Lock()

    def run(self) -> KafkaPosition | None:
        """Delete expired records if a check is due; returns the position up to which it deleted."""
        if self._settings.compact:
            return None
        with self._lock:
            self._read_markers()
            if time.monotonic() < self._due:
                return None
            self._due = time.monotonic() + self._pause
            return self._delete()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._tail.close()
            self._consumers.close()

    def _read_markers(self) -> None:
        for message in self._tail.follow():
            if message.key.startswith(MARKER_KEY) and message.value is not None:
                self._markers.append(message)
            if len(self._markers) > _MAX_MARKERS:
                self._markers = self._markers[::2]

    def _delete(self) -> KafkaPosition | None:
        positions = [KafkaPosition.decoded(message.offset, message.value or b"") for message in self._markers]
        read = min((KafkaPosition.of(consumer.offset).marker for consumer in self._consumers.all()), default=None)
        before = datetime.now(UTC) - timedelta(hours=self._settings.retention_hours)
        starts = self._cluster.admin.starts(topics_of(positions[-1] if positions else KafkaPosition()))
        position = removable(positions, read, before, starts, self._surplus(positions, starts))
        if position is None or not position.topics:
            return None
        self._cluster.admin.delete_records(
            {
                (topic, partition): end
                for topic, extent in position.topics.items()
                for partition, end in enumerate(extent.ends)
                if end
            }
        )
        self._markers = [message for message in self._markers if message.offset > position.marker]
        return position

    def _surplus(self, positions: Sequence[KafkaPosition], starts: PartitionOffsets) -> float:
        """How many retained messages are beyond the size limit, estimated by their mean size: Kafka reports only the
        size of whole partitions.

        Removed records may still be on disk and must not be counted again.
        """
        if not positions:
            return 0.0
        cut = sum(low > 0 for low in starts.values())
        size = self._cluster.admin.size(positions[-1].topics) - cut * SEGMENT_BYTES
        limit = self._settings.retention_gb * 2**30
        return retained_before(positions[-1], starts) * (1 - limit / size) if size > limit else 0.0


def removable(
    positions: Sequence[KafkaPosition],
    read: int | None,
    before: datetime,
    starts: PartitionOffsets,
    surplus: float = 0.0,
) -> KafkaPosition | None:
    """The last position up to which every row has been read and is older than `before` or among the `surplus` oldest
    retained messages. `read` is the last marker that all consumers have read (None: no consumer is registered). Pure.
    """
    micros = int((before - EPOCH).total_seconds() * 1_000_000)
    found = None
    for position in positions:
        if read is not None and position.marker > read:
            break
        if position.newest >= micros and retained_before(position, starts) > surplus:
            break
        found = position
    return found


def retained_before(position: KafkaPosition, starts: PartitionOffsets) -> int:
    """The number of retained messages before a position."""
    return sum(
        max(0, end - starts.get((topic, partition), 0))
        for topic, extent in position.topics.items()
        for partition, end in enumerate(extent.ends)
    )


def removed_until(cluster: Cluster, newest: KafkaPosition, positions: Sequence[KafkaPosition]) -> Lsn:
    """The LSN up to which Kafka has removed changes; 0 if every partition still begins at its first message."""
    starts = cluster.admin.starts(topics_of(newest))
    if not any(starts.values()):
        return ZERO_LSN
    return max((position.end for position in positions if _is_removed(position, starts)), default=_UNKNOWN_LSN)


def _is_removed(position: KafkaPosition, starts: PartitionOffsets) -> bool:
    known = [
        (end, starts[topic, partition])
        for topic, extent in position.topics.items()
        for partition, end in enumerate(extent.ends)
    ]
    return any(low for _, low in known) and all(end <= low for end, low in known)

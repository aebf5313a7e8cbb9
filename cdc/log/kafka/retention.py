"""Removes what is old, or too much, and read.

Kafka's own retention knows nothing of our consumers, so topics are made without it.
"""

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cdc.log.kafka.admin import Places
from cdc.log.kafka.client import Cluster
from cdc.log.kafka.consumers import ConsumerPositions
from cdc.log.kafka.position import EPOCH, MARKER_KEY, KafkaPosition, topics_of
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.topic_tail import Message, TopicTail
from cdc.log.kafka.topics import SEGMENT_BYTES

_REMEMBERED = 1000
"""Markers held; beyond this every second one is forgotten, which only makes the steps of removing longer."""
_LONGEST_PAUSE = 600.0


class TopicRetention:
    """Follows the markers as they are written, and deletes records up to one of them. Compacted topics are Kafka's."""

    def __init__(self, settings: KafkaSettings, cluster: Cluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._tail = TopicTail(cluster, settings.system_topic("position"))
        self._consumers = ConsumerPositions(cluster)
        self._markers: list[Message] = []
        self._pause = min(_LONGEST_PAUSE, settings.retention_hours * 36)
        self._due = 0.0
        self._lock = threading.Lock()

    def run(self) -> KafkaPosition | None:
        """Delete what may go; the place up to which everything was deleted. Looks now and then only."""
        if self._settings.compact:
            return None
        with self._lock:
            self._follow()
            if time.monotonic() < self._due:
                return None
            self._due = time.monotonic() + self._pause
            return self._delete()

    def close(self) -> None:
        """Let go of the connections."""
        with self._lock:
            self._tail.close()
            self._consumers.close()

    def _follow(self) -> None:
        for message in self._tail.follow():
            if message.key.startswith(MARKER_KEY) and message.value is not None:
                self._markers.append(message)
            if len(self._markers) > _REMEMBERED:
                self._markers = self._markers[::2]

    def _delete(self) -> KafkaPosition | None:
        places = [KafkaPosition.decoded(message.offset, message.value or b"") for message in self._markers]
        read = min((KafkaPosition.of(consumer.offset).marker for consumer in self._consumers.all()), default=None)
        before = datetime.now(UTC) - timedelta(hours=self._settings.retention_hours)
        lows = self._cluster.admin.starts(topics_of(places[-1] if places else KafkaPosition()))
        place = removable(places, read, before, lows, self._surplus(places, lows))
        if place is None or not place.topics:
            return None
        self._cluster.admin.delete_records(
            {
                (topic, partition): end
                for topic, extent in place.topics.items()
                for partition, end in enumerate(extent.ends)
                if end
            }
        )
        self._markers = [message for message in self._markers if message.offset > place.marker]
        return place

    def _surplus(self, places: Sequence[KafkaPosition], lows: Places) -> float:
        """How many of the kept messages are too many: sizes are known of whole partitions only, so by their mean size.

        What was removed may still be on disk, and must not be counted a second time.
        """
        if not places:
            return 0.0
        cut = sum(low > 0 for low in lows.values())
        size = self._cluster.admin.size(places[-1].topics) - cut * SEGMENT_BYTES
        room = self._settings.retention_gb * 2**30
        return kept_before(places[-1], lows) * (1 - room / size) if size > room else 0.0


def removable(
    places: Sequence[KafkaPosition], read: int | None, before: datetime, lows: Places, surplus: float = 0.0
) -> KafkaPosition | None:
    """The last place whose every row was read by all (`read` is the last marker that was; None: nobody is registered)
    and is either from before that time or among the `surplus` oldest of the messages kept. Pure."""
    micros = int((before - EPOCH).total_seconds() * 1_000_000)
    found = None
    for place in places:
        if read is not None and place.marker > read:
            break
        if place.newest >= micros and kept_before(place, lows) > surplus:
            break
        found = place
    return found


def kept_before(place: KafkaPosition, lows: Places) -> int:
    """How many messages that are still kept lie before a place."""
    return sum(
        max(0, end - lows.get((topic, partition), 0))
        for topic, extent in place.topics.items()
        for partition, end in enumerate(extent.ends)
    )

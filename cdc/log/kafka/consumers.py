"""The registered consumers of a Kafka log."""

import json
import threading
from collections.abc import Sequence
from datetime import UTC, datetime

from cdc.log.kafka.client import Cluster
from cdc.log.kafka.position import EPOCH, KafkaPosition
from cdc.log.kafka.topic_tail import TopicTail
from cdc.model import Lsn
from cdc.ports import Consumer, Lag, Offset


class ConsumerPositions:
    """Consumer positions in a compacted topic, keyed by the consumer's name. `created`: see TopicTail."""

    def __init__(self, cluster: Cluster, *, created: bool = False) -> None:
        self._cluster = cluster
        self._topic = cluster.settings.system_topic("consumers")
        self._tail = TopicTail(cluster, self._topic, transactional=False, created=created)
        self._known: dict[str, Consumer] = {}
        self._lock = threading.RLock()

    def all(self) -> Sequence[Consumer]:
        """Every registered consumer, ordered by name."""
        with self._lock:
            self._catch_up()
            return [self._known[name] for name in sorted(self._known)]

    def commit(self, name: str, reached: Lsn, offset: Offset) -> None:
        """Move a consumer forward; never back."""
        with self._lock:
            self._catch_up()
            known, order = self._known.get(name), KafkaPosition.of(offset).marker
            if known is not None:
                if known.reached >= reached and known.order >= order:
                    return
                reached = max(reached, known.reached)
                offset, order = (offset, order) if order > known.order else (known.offset, known.order)
            now = datetime.now(UTC)
            data = {"offset": offset, "reached": reached, "at": now.isoformat()}
            self._cluster.publish(self._topic, name.encode(), json.dumps(data).encode())
            self._known[name] = Consumer(name, offset, reached, now, order)

    def forget(self, name: str) -> None:
        """Unregister a consumer."""
        with self._lock:
            self._cluster.publish(self._topic, name.encode(), None)
            self._known.pop(name, None)

    def close(self) -> None:
        """Close the connections."""
        self._tail.close()

    def _catch_up(self) -> None:
        for message in self._tail.drain():
            name = message.key.decode()
            if message.value is None:
                self._known.pop(name, None)
                continue
            data = json.loads(message.value)
            at, offset = datetime.fromisoformat(data["at"]), Offset(data["offset"])
            self._known[name] = Consumer(name, offset, Lsn(data["reached"]), at, KafkaPosition.of(offset).marker)


def lag_of(consumer: Consumer, positions: Sequence[KafkaPosition]) -> Lag:
    """How far a consumer is behind the last of these positions."""
    unread = [position for position in positions if position.marker > consumer.order]
    head = positions[-1].end if positions else consumer.reached
    now = (datetime.now(UTC) - EPOCH).total_seconds()
    seconds = max(now - unread[0].newest / 1e6, 0.0) if unread and unread[0].newest else 0.0
    return Lag(consumer.name, max(head - consumer.reached, 0), len(unread), seconds)

"""Follows a small topic of one partition: first all its committed messages, then new ones."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from cdc.errors import LogCorrupt, LogLost
from cdc.log.kafka.client import CALL_SECONDS, Cluster, poll_messages, translate_error, watermarks


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a system topic."""

    offset: int
    key: bytes
    value: bytes | None


class TopicTail:
    """A topic from an offset on. Connects on first use; not for two threads at once.

    `created`: the log's writer, which has created the topic, must not take a broker that does not know it for a log
    without messages.
    """

    def __init__(
        self, cluster: Cluster, topic: str, after: int = -1, *, transactional: bool = True, created: bool = False
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._created = created
        # A committed transaction adds one invisible record after its last message.
        self._behind = 2 if transactional else 1
        self._consumer: Consumer | None = None
        self._end = -1
        self._last = after

    def drain(self) -> list[Message]:
        """Every committed message that was not returned before; nothing while the topic does not exist."""
        return list(self.follow())

    def follow(self) -> Iterator[Message]:
        """The same messages one by one, for topics too long for memory. Exhaust the iterator before the next call."""
        if self._consumer is None and not self._open():
            return
        consumer = self._consumer
        assert consumer is not None
        _, end = watermarks(consumer, self._topic, 0)
        if end > self._end:
            yield from self._until(consumer, end)

    def close(self) -> None:
        """Close the connection. The next call opens it again and continues."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _open(self) -> bool:
        if not self._exists():
            return False
        # The broker answers an empty fetch after this long: it bounds how late the end is detected.
        consumer = self._cluster.consumer(**{"fetch.wait.max.ms": 50, "fetch.error.backoff.ms": 50})
        start = OFFSET_BEGINNING if self._last < 0 else self._last + 1
        consumer.assign([TopicPartition(self._topic, 0, start)])
        self._consumer = consumer
        return True

    def _exists(self) -> bool:
        if not self._created:
            return self._topic in self._cluster.admin.topics([self._topic])
        if self._topic not in self._cluster.admin.existing([self._topic]):
            raise LogCorrupt(
                f"Topic {self._topic} is missing.", "Restore it, or start with a new prefix and a new snapshot."
            )
        return True

    def _until(self, consumer: Consumer, end: int) -> Iterator[Message]:
        deadline = time.monotonic() + CALL_SECONDS
        while self._last + self._behind < end:
            over = False
            for message in poll_messages(consumer, 0.05):
                error = message.error()
                if error is None:
                    self._last = message.offset() or 0
                    deadline = time.monotonic() + CALL_SECONDS
                    yield Message(self._last, message.key() or b"", message.value())
                elif error.code() == KafkaError._PARTITION_EOF:
                    over = (message.offset() or 0) >= end
                elif not error.retriable():
                    raise translate_error(error, f"reading {self._topic}")
            if over:
                break
            if time.monotonic() > deadline:
                raise LogLost(f"Kafka does not deliver {self._topic} up to its end.", "Check the brokers.")
        self._end = end

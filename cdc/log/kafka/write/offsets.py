"""The next offset of each partition, known before a message is sent, so that acknowledgements can be checked.

Why this is needed: a broker accepts any first batch on a partition that has no state of this producer (KAFKA-15591).
With several batches in flight to a new topic the first can be answered "not the leader" and the second stored. The
first is then lost, and everything including the commit reports success. So the writer first asks for the end of a
partition, which a broker answers only once it is the leader, and requires the messages to be stored right after it.
"""

from collections.abc import Mapping

from confluent_kafka import Producer

from cdc.log.kafka.admin import Topic
from cdc.log.kafka.client import Cluster, await_partitions

Ends = Mapping[Topic, Mapping[int, int]]
"""The offset after the last message, for each partition that received messages."""


class UnexpectedOffset(Exception):
    """Messages were stored at other offsets than expected: some were lost, or another process writes to the topic."""

    def __init__(self, topic: str, partition: int) -> None:
        super().__init__(f"{topic}-{partition}")


class Offsets:
    """The next offset of every partition that this writer has written to."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._next_offsets: dict[Topic, dict[int, int]] = {}

    def next_offsets(self, producer: Producer, topic: Topic) -> Mapping[int, int]:
        """The next offset of each partition of a topic. The first call asks the brokers."""
        known = self._next_offsets.get(topic)
        if known is None:
            await_partitions(producer, topic)
            ends = self._cluster.admin.ends([topic])
            known = self._next_offsets[topic] = {partition: end for (_, partition), end in ends.items()}
        return known

    def advance(self, ends: Ends) -> None:
        """Advance by a committed transaction: its messages and one invisible commit record per partition."""
        for topic, partitions in ends.items():
            self._next_offsets[topic].update({partition: end + 1 for partition, end in partitions.items()})

    def forget(self) -> None:
        """Ask the brokers again next time: an aborted transaction leaves an unknown number of records."""
        self._next_offsets.clear()

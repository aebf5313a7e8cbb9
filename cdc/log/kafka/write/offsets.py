"""Where each partition goes on: known before a message is sent, so that the acknowledgements can be compared.

Why this must be: on a partition that has no state of this producer yet, a broker takes any first batch (KAFKA-15591).
Of several batches under way to a topic that was made a moment ago the first can be answered "not the leader" and the
second be stored; the first is then lost, and everything, the commit too, reports success. So a partition is asked for
its end first, which a broker answers only once it leads it, and the messages must come to lie exactly behind that end.
"""

from collections.abc import Mapping

from confluent_kafka import Producer

from cdc.log.kafka.admin import Topic
from cdc.log.kafka.client import Cluster, introduce

Ends = Mapping[Topic, Mapping[int, int]]
"""The offset after the last message in each partition that got one."""


class Mispredicted(Exception):
    """Messages did not come to lie where they should: some were lost on the way, or somebody else writes there."""

    def __init__(self, topic: str, partition: int) -> None:
        super().__init__(f"{topic}-{partition}")


class Offsets:
    """The next offset of every partition that this writer has written to."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nexts: dict[Topic, dict[int, int]] = {}

    def nexts(self, producer: Producer, topic: Topic) -> Mapping[int, int]:
        """Where each partition of a topic goes on. The first time the producer and the leaders are asked."""
        known = self._nexts.get(topic)
        if known is None:
            introduce(producer, topic)
            ends = self._cluster.admin.ends([topic])
            known = self._nexts[topic] = {partition: end for (_, partition), end in ends.items()}
        return known

    def expect(self, ends: Ends) -> None:
        """A transaction commits: its messages, and behind them the record that ends it."""
        for topic, partitions in ends.items():
            self._nexts[topic].update({partition: end + 1 for partition, end in partitions.items()})

    def forget(self) -> None:
        """Ask again: nobody knows what an aborted transaction has left."""
        self._nexts.clear()

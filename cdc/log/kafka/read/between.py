"""What lies between two places of a log in Kafka."""

from cdc.log.kafka.client import Cluster
from cdc.log.kafka.position import KafkaPosition, TopicExtent
from cdc.log.kafka.read.ranges import OffsetRange
from cdc.log.kafka.topics import refuse_changed


def distance(after: KafkaPosition, until: KafkaPosition) -> int:
    """How many offsets lie between two places: at least the number of rows."""
    return sum(item.end - (item.start or 0) for item in ranges(after, until))


def ranges(after: KafkaPosition, until: KafkaPosition) -> list[OffsetRange]:
    """What to read to come from one place to another.

    A topic that `after` does not know was made later, so its offset 0 must still be there; before the very first
    place, whatever is kept will do.
    """
    found = []
    for topic, extent in until.topics.items():
        known = after.topics.get(topic, TopicExtent(extent.id, (0,) * len(extent.ends)))
        for partition, (start, end) in enumerate(zip(known.ends, extent.ends, strict=True)):
            if start < end:
                found.append(OffsetRange(topic, partition, None if after.marker < 0 else start, end))
    return found


def check(cluster: Cluster, after: KafkaPosition, until: KafkaPosition) -> None:
    """The topics of both places must be the ones that the cluster has: same id, same partitions."""
    found = cluster.admin.topics(list(until.topics)) if until.topics else {}
    for place in (after, until):
        for name, extent in place.topics.items():
            refuse_changed(name, extent, found.get(name))

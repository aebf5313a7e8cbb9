"""Up to where Kafka, or our retention in it, has removed what the log once held."""

from collections.abc import Sequence

from cdc.log.kafka.admin import Places
from cdc.log.kafka.client import Cluster
from cdc.log.kafka.position import KafkaPosition, topics_of
from cdc.model import ZERO_LSN, Lsn

_SOMEWHERE = Lsn(1)
"""Some was removed, and no marker that is kept says up to where."""


def removed(cluster: Cluster, newest: KafkaPosition, places: Sequence[KafkaPosition]) -> Lsn:
    """The end of the last place whose rows are gone; 0 if every partition still begins at its first message."""
    lows = cluster.admin.starts(topics_of(newest))
    if not any(lows.values()):
        return ZERO_LSN
    return max((place.end for place in places if _gone(place, lows)), default=_SOMEWHERE)


def _gone(place: KafkaPosition, lows: Places) -> bool:
    known = [
        (end, lows[topic, partition])
        for topic, extent in place.topics.items()
        for partition, end in enumerate(extent.ends)
    ]
    return any(low for _, low in known) and all(end <= low for end, low in known)

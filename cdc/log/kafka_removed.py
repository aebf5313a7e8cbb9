"""Up to where Kafka, or our retention in it, has removed what the log once held."""

from collections.abc import Sequence
from contextlib import closing

from cdc.log.kafka_client import Cluster, watermarks
from cdc.log.kafka_position import Place
from cdc.model import ZERO_LSN, Lsn

_SOMEWHERE = Lsn(1)
"""Some was removed, and no marker that is kept says up to where."""


def removed(cluster: Cluster, newest: Place, places: Sequence[Place]) -> Lsn:
    """The end of the last place whose rows are gone; 0 if every partition still begins at its first message."""
    with closing(cluster.consumer()) as consumer:
        lows = {
            topic: [watermarks(consumer, topic, partition)[0] for partition in range(len(extent.ends))]
            for topic, extent in newest.topics.items()
        }
    if not any(low for partitions in lows.values() for low in partitions):
        return ZERO_LSN
    return max((place.end for place in places if _gone(place, lows)), default=_SOMEWHERE)


def _gone(place: Place, lows: dict[str, list[int]]) -> bool:
    known = [
        (end, low) for topic, extent in place.topics.items() for end, low in zip(extent.ends, lows[topic], strict=True)
    ]
    return any(low for _, low in known) and all(end <= low for end, low in known)

"""Removes what is old and read. Kafka's own retention knows nothing of our consumers, so topics are made without it."""

from datetime import UTC, datetime, timedelta

from confluent_kafka import KafkaException, TopicPartition

from cdc.log.kafka_client import Cluster, in_our_words
from cdc.log.kafka_position import Place
from cdc.log.kafka_reader import EPOCH, KafkaReader
from cdc.log.kafka_settings import KafkaSettings


def retain(settings: KafkaSettings, cluster: Cluster) -> Place | None:
    """Delete records that are past the retention time and that every registered consumer has read.

    Returns the place up to which everything was deleted. Compacted topics are left to Kafka.
    """
    if settings.compact:
        return None
    reader = KafkaReader(settings)
    try:
        place = removable(reader, datetime.now(UTC) - timedelta(hours=settings.retention_hours))
    finally:
        reader.close()
    if place is None or not place.topics:
        return None
    up_to = [
        TopicPartition(topic, partition, end)
        for topic, extent in place.topics.items()
        for partition, end in enumerate(extent.ends)
        if end
    ]
    for future in cluster.admin().delete_records(up_to).values():
        try:
            future.result()
        except KafkaException as error:
            raise in_our_words(error.args[0], "removing old records") from None
    return place


def removable(reader: KafkaReader, before: datetime) -> Place | None:
    """The last place whose every row was committed before that time and was read by every registered consumer."""
    micros = int((before - EPOCH).total_seconds() * 1_000_000)
    read = min((Place.of(consumer.offset).marker for consumer in reader.consumers()), default=None)
    found = None
    for place in reader.places():
        if place.newest >= micros or (read is not None and place.marker > read):
            break
        found = place
    return found

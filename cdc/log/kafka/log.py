"""The Kafka log: one topic per table in Debezium's envelope; rows and position are committed together.

See docs/kafka.md for the topics and their settings, docs/adr/0008-kafka-log.md for the reasons.
"""

from cdc.config.settings import Settings
from cdc.errors import ConfigError
from cdc.log.kafka.client import check_brokers
from cdc.log.kafka.read.reader import KafkaReader
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.write.writer import KafkaWriter
from cdc.log.registry import LogKind


def _kafka_settings(settings: Settings) -> KafkaSettings:
    if not isinstance(settings.log, KafkaSettings):
        raise ConfigError("The log's settings are not those of a Kafka log.", "Set log.kind to kafka.")
    return settings.log


def _open_writer(settings: Settings) -> KafkaWriter:
    return KafkaWriter(_kafka_settings(settings), settings.source.database, settings.state / "kafka")


def _open_reader(settings: Settings) -> KafkaReader:
    return KafkaReader(_kafka_settings(settings))


def _check_brokers(settings: Settings, seconds: float) -> None:
    check_brokers(_kafka_settings(settings), seconds)


KIND = LogKind(KafkaSettings, _open_writer, _open_reader, _check_brokers)

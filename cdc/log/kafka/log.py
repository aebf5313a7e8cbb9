"""The Kafka log: one topic a table in Debezium's envelope, rows and position committed together.

See docs/kafka.md for the topics and their settings, docs/adr/0008-kafka-log.md for the reasons.
"""

from cdc.config.settings import Settings
from cdc.errors import ConfigError
from cdc.log.kafka.client import greet
from cdc.log.kafka.read.reader import KafkaReader
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.write.writer import KafkaWriter
from cdc.log.registry import LogKind


def _own(settings: Settings) -> KafkaSettings:
    if not isinstance(settings.log, KafkaSettings):
        raise ConfigError("The log's settings are not those of a Kafka log.", "Set log.kind to kafka.")
    return settings.log


def _open_writer(settings: Settings) -> KafkaWriter:
    return KafkaWriter(_own(settings), settings.source.database, settings.state / "kafka")


def _open_reader(settings: Settings) -> KafkaReader:
    return KafkaReader(_own(settings))


def _knock(settings: Settings, seconds: float) -> None:
    greet(_own(settings), seconds)


KIND = LogKind("kafka", KafkaSettings, _open_writer, _open_reader, _knock)

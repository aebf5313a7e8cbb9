"""The topics of a log: created as configured, and checked to be the same topics that the position refers to."""

import time
from collections.abc import Iterable, Mapping

from cdc.errors import LogCorrupt, LogError
from cdc.log.kafka.admin import Topic
from cdc.log.kafka.client import CALL_SECONDS, Cluster
from cdc.log.kafka.envelope.encode import join_table, split_table, topic_of
from cdc.log.kafka.position import KafkaPosition, TopicExtent
from cdc.log.kafka.settings import KafkaSettings

_HOUR_MS = 3_600_000
SYSTEM_TOPICS = ("position", "schemas", "consumers", "oversize")
SEGMENT_BYTES = 64 << 20
"""Kafka frees disk space by whole segments: this much of a partition may be removed and still use disk space."""
COMPACTED = {
    "cleanup.policy": "compact",
    # Small segments: a starting writer reads everything that is not compacted yet.
    "segment.bytes": str(16 << 20),
    "min.cleanable.dirty.ratio": "0.1",
}


class Topics:
    """Creates topics on first use and caches their descriptions."""

    def __init__(self, cluster: Cluster, settings: KafkaSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._tables: dict[str, str] = {}
        self._known: dict[str, Topic] = {}

    def prepare(self) -> None:
        """Create the log's own topics."""
        names = {self._settings.system_topic(name): name for name in SYSTEM_TOPICS}
        found = self._cluster.admin.topics(list(names))
        for topic, name in names.items():
            if topic not in found:
                config = {} if name == "oversize" else COMPACTED
                self._create(topic, 1, config)
            self._known[topic] = found[topic] if topic in found else self._await_known(topic)

    def system(self, name: str) -> Topic:
        """One of the log's own topics."""
        return self._known[self._settings.system_topic(name)]

    def is_table_topic(self, topic: Topic) -> bool:
        """Whether a topic has rows of a table."""
        return topic.name not in {self._settings.system_topic(part) for part in SYSTEM_TOPICS}

    def check(self, position: KafkaPosition) -> None:
        """Compare every topic of a position with the cluster's. Raises LogCorrupt if one differs."""
        found = self._cluster.admin.existing(position.topics)
        for name, extent in position.topics.items():
            topic = found.get(name)
            require_unchanged(name, extent, topic)
            if topic is not None:
                self._known[name] = topic

    def of(self, table: str) -> Topic:
        """The topic of a table, created if it is new."""
        name = self._tables.get(table)
        if name is None:
            name = topic_of(self._settings.prefix, table)
            self._refuse_shared(name, table)
            self._tables[table] = name
        topic = self._known.get(name)
        if topic is None:
            topic = self._known[name] = self._get_or_create(name)
        return topic

    def register(self, tables: Iterable[str]) -> None:
        """Register the topics of tables that were captured before."""
        for table in tables:
            self._tables[table] = topic_of(self._settings.prefix, table)

    def _get_or_create(self, name: str) -> Topic:
        found = self._cluster.admin.topics([name])
        if name not in found:
            self._create(name, self._settings.partitions, self._config())
            return self._await_known(name)
        return found[name]

    def _create(self, name: str, partitions: int, config: Mapping[str, str]) -> None:
        least = self._settings.min_insync
        insync = {"min.insync.replicas": str(least)} if least else {}
        self._cluster.admin.create(name, partitions, self._settings.replication, {**config, **insync})

    def _await_known(self, name: str) -> Topic:
        """Wait until the brokers know a new topic."""
        deadline = time.monotonic() + CALL_SECONDS
        while not (found := self._cluster.admin.topics([name])):
            if time.monotonic() > deadline:
                raise LogError(f"Topic {name} was created but is not visible.", "Check the ACL to describe it.")
            time.sleep(0.02)
        return found[name]

    def _refuse_shared(self, name: str, table: str) -> None:
        system = {self._settings.system_topic(part) for part in SYSTEM_TOPICS}
        for other, topic in self._tables.items():
            if topic == name and split_table(other) != split_table(table):
                raise LogError(
                    f"Tables {other} and {join_table(*split_table(table))} would share topic {name}: "
                    "Kafka allows only letters, digits, dot, _ and -.",
                    "Rename one of them or leave it out of source.tables.",
                )
        if name in system:
            raise LogError(f"Table {table} would use topic {name}, which is the log's own.", "Choose another prefix.")

    def _config(self) -> dict[str, str]:
        retention = str(int(self._settings.retention_hours * _HOUR_MS))
        # Kafka's own retention would remove unread messages: see cdc.log.kafka.retention.
        config = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
        if self._settings.compact:
            config = {
                "cleanup.policy": "compact",
                "min.compaction.lag.ms": retention,
                "delete.retention.ms": retention,
            }
        # A record batch has a header beside the message.
        limits = {"max.message.bytes": self._settings.max_message_bytes + 4096, "segment.bytes": SEGMENT_BYTES}
        return {**config, **{name: str(limit) for name, limit in limits.items()}}


def require_unchanged(name: str, extent: TopicExtent, topic: Topic | None) -> None:
    """Raise LogCorrupt if a topic is gone, was created again, or has other partitions."""
    if topic is None:
        raise LogCorrupt(
            f"Topic {name} is missing, but the log's position says that it has rows.",
            "Restore it, or start with a new prefix and a new snapshot.",
        )
    if topic.id != extent.id:
        raise LogCorrupt(
            f"Topic {name} was deleted and created again: its changes are lost.",
            "Start with a new prefix and a new snapshot.",
        )
    if topic.partitions != len(extent.ends):
        raise LogCorrupt(
            f"Topic {name} had {len(extent.ends)} partition(s) and has {topic.partitions} now: "
            "keys would move to other partitions and lose their order.",
            "Start with a new prefix: Kafka cannot remove partitions.",
        )

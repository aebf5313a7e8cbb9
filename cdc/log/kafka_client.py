"""Clients of a Kafka cluster, and its errors in our words: the only file that knows librdkafka's error codes."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from cdc.errors import ConfigError, LogCorrupt, LogError, LogFenced, LogFull, LogLost
from cdc.log.kafka_settings import KafkaConnectionSettings

log = logging.getLogger(__name__)
_quiet = logging.getLogger("cdc.log.kafka.client")
_quiet.setLevel(logging.CRITICAL)  # librdkafka tells of every reconnect; what matters comes to us as an error

_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
_REFUSED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
}
_GONE = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID}
"""Said by a broker. What the client itself does not know (_UNKNOWN_TOPIC) it may know once it is connected again."""
_LOST_OFFSET = {KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET, KafkaError._NO_OFFSET}
_FULL = {KafkaError.KAFKA_STORAGE_ERROR, KafkaError.POLICY_VIOLATION}

_FETCH = 10_000
CALL_SECONDS = 30.0
"""How long one question to the cluster may take."""


def in_our_words(error: KafkaError, doing: str) -> LogError:
    """The error that our callers know. librdkafka's text names brokers and codes, never a message's content."""
    code = error.code()
    said = f"{error.name()}: {error.str()}"
    if code in _FENCED:
        return LogFenced(
            f"Kafka fenced this writer while {doing}: another one has taken over the log.", "Stop this one."
        )
    if code in _REFUSED:
        return LogError(f"Kafka refused us while {doing} ({said}).", "Check the user, its password and its ACLs.")
    if code in _GONE:
        return LogCorrupt(
            f"A topic of the log is gone, seen while {doing} ({said}).", "See docs/kafka.md, lost topics."
        )
    if code in _LOST_OFFSET:
        return LogCorrupt(
            f"Kafka no longer has what was not read yet, seen while {doing} ({said}).", "See docs/kafka.md, retention."
        )
    if code in _FULL:
        return LogFull(f"Kafka cannot store more, seen while {doing} ({said}).", "Make room on the brokers.")
    return LogLost(f"Kafka does not answer as it should while {doing} ({said}).", "Look at the brokers.")


@contextmanager
def speaking(doing: str) -> Iterator[None]:
    """Turn librdkafka's exceptions into ours."""
    try:
        yield
    except KafkaException as error:
        raise in_our_words(error.args[0], doing) from None


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster has it now. `id` tells a topic from another one of the same name made later."""

    name: str
    id: str
    partitions: int


class Cluster:
    """Makes clients from settings; the one for questions is made on the first."""

    def __init__(self, settings: KafkaConnectionSettings, patience: float = CALL_SECONDS) -> None:
        self.settings = settings
        self._patience = patience
        self._admin: AdminClient | None = None
        self._producer: Producer | None = None

    def producer(self, **options: str | int | float | bool) -> Producer:
        """A producer whose acknowledgements mean durable and whose retries neither repeat nor reorder."""
        firm = {"acks": "all", "enable.idempotence": True}
        with _settled("producer"):
            return Producer({**self.settings.options(), **options, **firm}, logger=_quiet)

    def consumer(self, **options: str | int | float | bool) -> Consumer:
        """A consumer that sees committed messages only, and an error instead of a jump over lost ones."""
        firm = {
            "group.id": self.settings.system_topic("reader"),
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
        with _settled("consumer"):
            return Consumer({**self.settings.options(), **options, **firm}, logger=_quiet)

    def admin(self) -> AdminClient:
        """For topics. Kept: an answer is lost when its client is."""
        if self._admin is None:
            with _settled("admin client"):
                self._admin = AdminClient(self.settings.options(), logger=_quiet)
        return self._admin

    def publish(self, topic: str, key: bytes, value: bytes | None) -> None:
        """Store one message outside of any transaction; durable on return."""
        if self._producer is None:
            self._producer = self.producer()
        failures: list[KafkaError] = []

        def delivered(error: KafkaError | None, _message: object) -> None:
            if error is not None:
                failures.append(error)

        with speaking(f"writing to {topic}"):
            self._producer.produce(topic, value, key, 0, on_delivery=delivered)
        left = self._producer.flush(self._patience)
        if failures:
            raise in_our_words(failures[0], f"writing to {topic}")
        if left:
            raise LogLost(f"Kafka did not acknowledge a message to {topic}.", "Look at the brokers.")

    def topics(self, names: list[str]) -> dict[str, Topic]:
        """Those of the named topics that exist."""
        found = {}
        asked = self.admin().describe_topics(TopicCollection(names), request_timeout=self._patience)
        for name, future in asked.items():
            try:
                described = future.result()
            except KafkaException as error:
                if error.args[0].code() in _GONE:
                    continue
                raise in_our_words(error.args[0], f"looking at topic {name}") from None
            found[name] = Topic(name, str(described.topic_id), len(described.partitions))
        return found

    def names(self) -> list[str]:
        """Every topic that this user may see."""
        with speaking("listing topics"):
            return sorted(self.admin().list_topics(timeout=self._patience).topics)

    def offsets_at(self, consumer: Consumer, topic: str, partitions: int, millis: int) -> list[int]:
        """The first offset of each partition with a message of that time or later; -1 where there is none."""
        asked = [TopicPartition(topic, partition, millis) for partition in range(partitions)]
        with speaking(f"asking for offsets of {topic} by time"):
            return [found.offset for found in consumer.offsets_for_times(asked, timeout=self._patience)]

    def ends(self, topic: Topic) -> dict[int, int]:
        """The offset after the last message of each partition, committed or not; waits until each has a leader."""
        deadline = time.monotonic() + self._patience
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(topic.name, partition): latest for partition in range(topic.partitions)}
        while True:
            answers = self.admin().list_offsets(asked, request_timeout=self._patience)
            try:
                return {place.partition: future.result().offset for place, future in answers.items()}
            except KafkaException as error:
                said = in_our_words(error.args[0], f"asking for the ends of {topic.name}")
                if not said.transient or time.monotonic() > deadline:
                    raise said from None
            time.sleep(0.01)

    def create(self, name: str, partitions: int, replication: int, config: Mapping[str, str]) -> None:
        """Make a topic; one that is there already is left as it is."""
        topic = NewTopic(name, num_partitions=partitions, replication_factor=replication, config=dict(config))
        for future in self.admin().create_topics([topic], request_timeout=self._patience).values():
            try:
                future.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise in_our_words(error.args[0], f"making topic {name}") from None
        log.info("made topic %s with %d partition(s)", name, partitions)


def introduce(producer: Producer, topic: Topic) -> None:
    """Wait until a producer knows all partitions: what it is given before then waits in a queue without an order."""
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        with speaking(f"asking for the leaders of {topic.name}"):
            found = producer.list_topics(topic.name, CALL_SECONDS).topics.get(topic.name)
        if found is not None and found.error is None and len(found.partitions) >= topic.partitions:
            return
        if time.monotonic() > deadline:
            raise LogLost(f"Topic {topic.name} has no leaders yet.", "Look at the brokers.")
        time.sleep(0.01)


def available(consumer: Consumer, seconds: float) -> list["Message[bytes, bytes]"]:
    """What has come, or the first that comes within that time: `consume` alone waits until it has all it may take."""
    first = consumer.consume(1, seconds)
    return first + consumer.consume(_FETCH, 0) if first else first


def watermarks(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """First kept offset and the offset after the last committed message, as the broker has them now."""
    with speaking(f"asking for the ends of {topic}-{partition}"):
        found = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=CALL_SECONDS, cached=False)
    if found is None:
        raise LogLost(f"Kafka did not say where {topic}-{partition} ends.", "Look at the brokers.")
    low, high = found
    return int(low), int(high)


@contextmanager
def _settled(what: str) -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        raise ConfigError(
            f"librdkafka refuses the settings of a {what}: {error.args[0].str()}.", "See log.client."
        ) from None

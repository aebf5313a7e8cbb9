"""Clients of a Kafka cluster that carry messages, and their errors in our words.

The only file that knows librdkafka's error codes; questions about the cluster are `cdc.log.kafka.admin`'s.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from cdc.errors import ConfigError, LogCorrupt, LogError, LogFenced, LogFull, LogLost
from cdc.log.kafka.admin import Admin, Topic
from cdc.log.kafka.settings import KafkaConnectionSettings

_quiet = logging.getLogger("cdc.log.kafka.log.client")
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
    KafkaError._SSL,
}
_CHECK = "Check the user, its password and its ACLs."
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
        remedy = "Check log.ca and our own certificate." if code == KafkaError._SSL else _CHECK
        return LogError(f"Kafka refused us while {doing} ({said}).", remedy)
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


Option = str | int | float | bool | Callable[[KafkaError], None]


class Cluster:
    """Makes clients from settings. `admin` answers questions."""

    def __init__(self, settings: KafkaConnectionSettings, patience: float = CALL_SECONDS) -> None:
        self.settings = settings
        self._patience = patience
        self.admin = Admin(settings, patience, partial(_knock, settings, patience))
        self._producer: Producer | None = None

    def producer(self, **options: Option) -> Producer:
        """A producer whose acknowledgements mean durable and whose retries neither repeat nor reorder."""
        return _producer(self.settings, **options)

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


def _producer(settings: KafkaConnectionSettings, **options: Option) -> Producer:
    firm = {"acks": "all", "enable.idempotence": True}
    with _settled("producer"):
        return Producer({**settings.options(), **options, **firm}, logger=_quiet)


def greet(settings: KafkaConnectionSettings, seconds: float) -> None:
    """Raise LogError if no broker lets us in within that time: its refusal, or LogLost if none answers at all."""
    errors: list[KafkaError] = []
    deadline = time.monotonic() + seconds
    with closing(_producer(settings, error_cb=errors.append)) as client:
        while time.monotonic() < deadline:
            with suppress(KafkaException):
                client.list_topics(timeout=min(1.0, seconds))
                return
            client.poll(0)
            for refusal in (said for error in errors if not (said := in_our_words(error, "logging in")).transient):
                raise refusal
    # A broker that asks for a certificate and gets none only hangs up.
    asked = settings.security.endswith("ssl") and not settings.certificate
    raise LogLost(
        f"Kafka does not answer: no broker of log.bootstrap ({settings.bootstrap}) did within {seconds:g} s.",
        "Start the brokers, or correct log.bootstrap and log.security; the pipeline then goes on by itself."
        + (" If they ask for a certificate, name ours in log.certificate and log.key." if asked else ""),
    )


def _knock(settings: KafkaConnectionSettings, patience: float) -> None:
    """Raise LogError if the brokers do not let us in. A plain door is open; kafka-python says if nobody is there."""
    if settings.security != "plaintext":
        greet(settings, patience)


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

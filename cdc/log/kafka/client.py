"""librdkafka producers and consumers, and the translation of their errors into the log's errors.

The only module that knows librdkafka's error codes. Administrative requests are in `cdc.log.kafka.admin`.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from cdc.errors import ConfigError, LogCorrupt, LogError, LogFenced, LogFull, LogLost
from cdc.log.kafka.admin import AGREE_PAUSE, AGREE_SECONDS, Admin, Topic
from cdc.log.kafka.settings import KafkaConnectionSettings

_quiet = logging.getLogger("cdc.log.kafka.librdkafka")
_quiet.setLevel(logging.CRITICAL)  # librdkafka logs every reconnect; anything important is raised as an error

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
"""Reported by a broker. Not _UNKNOWN_TOPIC, which the client reports itself and which a reconnect may resolve."""
_NOT_AGREED = _GONE | {
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
}
"""What brokers answer that have not heard of a new topic or a new leader yet."""
_LOST_OFFSET = {KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET, KafkaError._NO_OFFSET}
_FULL = {KafkaError.KAFKA_STORAGE_ERROR, KafkaError.POLICY_VIOLATION}

_FETCH = 10_000
CALL_SECONDS = 30.0
"""How long one request to the cluster may take."""


def translate_error(error: KafkaError, doing: str) -> LogError:
    """The log's error for a librdkafka error. librdkafka's text names brokers and codes, never message content."""
    code = error.code()
    text = f"{error.name()}: {error.str()}"
    if code in _FENCED:
        return LogFenced(
            f"Kafka fenced this writer while {doing}: another writer has taken over the log.", "Stop this one."
        )
    if code in _REFUSED:
        remedy = "Check log.ca and log.certificate." if code == KafkaError._SSL else _CHECK
        return LogError(f"Kafka refused access while {doing} ({text}).", remedy)
    if code in _GONE:
        return LogCorrupt(
            f"A topic of the log is missing, detected while {doing} ({text}).", "See docs/kafka.md, lost topics."
        )
    if code in _LOST_OFFSET:
        return LogCorrupt(
            f"Kafka removed messages before they were read, detected while {doing} ({text}).",
            "See docs/kafka.md, retention.",
        )
    if code in _FULL:
        return LogFull(f"Kafka cannot store more, detected while {doing} ({text}).", "Free disk space on the brokers.")
    return LogLost(f"Kafka failed while {doing} ({text}).", "Check the brokers.")


@contextmanager
def translating_errors(doing: str) -> Iterator[None]:
    """Translate librdkafka's exceptions into the log's."""
    try:
        yield
    except KafkaException as error:
        raise translate_error(error.args[0], doing) from None


Option = str | int | float | bool | Callable[[KafkaError], None]


class Cluster:
    """Creates clients from settings. `admin` is for administrative requests."""

    def __init__(self, settings: KafkaConnectionSettings, timeout: float = CALL_SECONDS) -> None:
        self.settings = settings
        self._timeout = timeout
        self.admin = Admin(settings, timeout, partial(_check_login, settings, timeout))
        self._producer: Producer | None = None

    def producer(self, **options: Option) -> Producer:
        """A producer that acknowledges durable messages only and whose retries neither repeat nor reorder messages."""
        return _producer(self.settings, {**options, "acks": "all", "enable.idempotence": True})

    def consumer(self, **options: str | int | float | bool) -> Consumer:
        """A consumer that sees committed messages only and raises an error rather than skip lost ones."""
        fixed = {
            "group.id": self.settings.system_topic("reader"),
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
        with _checking_options("consumer"):
            return Consumer({**self.settings.options(), **options, **fixed}, logger=_quiet)

    def publish(self, topic: str, key: bytes, value: bytes | None) -> None:
        """Store one message outside a transaction; durable on return."""
        if self._producer is None:
            self._producer = self.producer()
        failures: list[KafkaError] = []

        def delivered(error: KafkaError | None, _message: object) -> None:
            if error is not None:
                failures.append(error)

        with translating_errors(f"writing to {topic}"):
            self._producer.produce(topic, value, key, 0, on_delivery=delivered)
        left = self._producer.flush(self._timeout)
        if failures:
            raise translate_error(failures[0], f"writing to {topic}")
        if left:
            raise LogLost(f"Kafka did not acknowledge a message to {topic}.", "Check the brokers.")


def _producer(settings: KafkaConnectionSettings, options: Mapping[str, Option]) -> Producer:
    with _checking_options("producer"):
        return Producer({**settings.options(), **options}, logger=_quiet)


def check_brokers(settings: KafkaConnectionSettings, seconds: float) -> None:
    """Log in to a broker within that time. Raises LogError if a broker refuses, LogLost if none answers.

    The client is not an idempotent one: that asks for a producer id, and a user who may log in but lacks that right
    would fail with a fatal error whenever the client is closed after the answer has come.
    """
    errors: list[KafkaError] = []
    deadline = time.monotonic() + seconds
    with closing(_producer(settings, {"error_cb": errors.append, "enable.idempotence": False})) as client:
        while time.monotonic() < deadline:
            with suppress(KafkaException):
                client.list_topics(timeout=min(1.0, seconds))
                return
            client.poll(0)
            for error in errors:
                refusal = translate_error(error, "logging in")
                if not refusal.transient:
                    raise refusal
    # A broker that requires a client certificate and gets none only closes the connection.
    needs_certificate = settings.security.endswith("ssl") and not settings.certificate
    raise LogLost(
        f"Kafka does not answer: no broker of log.bootstrap ({settings.bootstrap}) answered within {seconds:g} s.",
        "Start the brokers, or correct log.bootstrap and log.security; the pipeline then continues by itself."
        + (" If they require a client certificate, set log.certificate and log.key." if needs_certificate else ""),
    )


def _check_login(settings: KafkaConnectionSettings, timeout: float) -> None:
    """Raise LogError if the login fails. Skipped for PLAINTEXT: kafka-python reports unreachable brokers."""
    if settings.security != "plaintext":
        check_brokers(settings, timeout)


def await_partitions(producer: Producer, topic: Topic) -> None:
    """Wait until a producer knows all partitions of a topic: it does not keep the order of messages queued before."""
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        with translating_errors(f"asking for the leaders of {topic.name}"):
            found = producer.list_topics(topic.name, CALL_SECONDS).topics.get(topic.name)
        if found is not None and found.error is None and len(found.partitions) >= topic.partitions:
            return
        if time.monotonic() > deadline:
            raise LogLost(f"Topic {topic.name} has no leaders yet.", "Check the brokers.")
        time.sleep(0.01)


def poll_messages(consumer: Consumer, seconds: float) -> list["Message[bytes, bytes]"]:
    """Available messages, or the first to arrive within that time. `consume` alone would wait for a full batch."""
    first = consumer.consume(1, seconds)
    return first + consumer.consume(_FETCH, 0) if first else first


def watermarks(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """The first retained offset and the offset after the last committed message, asked from the broker now."""
    deadline = time.monotonic() + AGREE_SECONDS
    while True:
        try:
            found = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=CALL_SECONDS, cached=False)
            break
        except KafkaException as error:
            if error.args[0].code() not in _NOT_AGREED or time.monotonic() > deadline:
                raise translate_error(error.args[0], f"asking for the ends of {topic}-{partition}") from None
            time.sleep(AGREE_PAUSE)
    if found is None:
        raise LogLost(f"Kafka did not report the end of {topic}-{partition}.", "Check the brokers.")
    low, high = found
    return int(low), int(high)


@contextmanager
def _checking_options(what: str) -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        raise ConfigError(
            f"librdkafka refuses the settings of a {what}: {error.args[0].str()}.", "See log.client."
        ) from None

"""Administrative requests to a Kafka cluster: topics, offsets, sizes, removal of records.

They use kafka-python, which returns plain data in the calling thread; none of them is frequent. Messages go through
librdkafka: see `cdc.log.kafka.client`.
"""

import logging
import threading
import time
import weakref
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from kafka import IsolationLevel, KafkaAdminClient, OffsetSpec, TopicPartition
from kafka import errors as kafka_errors

from cdc.errors import LogCorrupt, LogError, LogFull, LogLost
from cdc.log.kafka.settings import KafkaConnectionSettings

log = logging.getLogger(__name__)
logging.getLogger("kafka").setLevel(logging.CRITICAL)  # it logs every reconnect; anything important is raised

PartitionOffsets = Mapping[tuple[str, int], int]
"""An offset for each topic and partition."""
Answer = TypeVar("Answer")

_REFUSED = (
    kafka_errors.AuthorizationError,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
    kafka_errors.SaslAuthenticationFailedError,
)
_UNKNOWN_TOPIC = kafka_errors.UnknownTopicOrPartitionError.errno
AGREE_SECONDS = 3.0
"""How long the brokers of a cluster may disagree: each learns of a new topic or a new leader at its own moment."""
AGREE_PAUSE = 0.05
"""Seconds between two questions to brokers that disagree."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster has it now. `id` differs if a topic is deleted and created again."""

    name: str
    id: str
    partitions: int


class Admin:
    """Connects at the first request. Safe for several threads; runs one request at a time.

    It first calls `check_login`, which raises if the login fails: kafka-python would retry until its timeout and not
    report the reason.
    """

    def __init__(self, settings: KafkaConnectionSettings, timeout: float, check_login: Callable[[], None]) -> None:
        self._settings = settings
        self._timeout = timeout
        self._check_login = check_login
        self._client: KafkaAdminClient | None = None
        self._finalizer: weakref.finalize[[KafkaAdminClient], Admin] | None = None
        self._lock = threading.Lock()

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Those of the named topics that exist."""
        wanted = list(names)
        if not wanted:
            return {}
        found = {}
        for answer in self._request("describing topics", lambda client: client.describe_topics(wanted)):
            name, code = answer["name"], answer["error_code"]
            if code == _UNKNOWN_TOPIC:
                continue
            if code:
                raise _translate_error(kafka_errors.for_code(code)(), f"describing topic {name}")
            found[name] = Topic(name, _id_text(answer["topic_id"]), len(answer["partitions"]))
        return found

    def existing(self, names: Iterable[str]) -> dict[str, Topic]:
        """The named topics, which have existed: a broker that was just started may not know all of them yet."""
        wanted = set(names)
        deadline = time.monotonic() + AGREE_SECONDS
        while len(found := self.topics(wanted)) < len(wanted) and time.monotonic() < deadline:
            time.sleep(AGREE_PAUSE)
        return found

    def names(self) -> list[str]:
        """Every topic that this user may describe."""
        return sorted(self._request("listing topics", lambda client: client.list_topics()))

    def create(self, name: str, partitions: int, replication: int, config: Mapping[str, str]) -> None:
        """Create a topic. Does nothing if it exists."""
        options = {"num_partitions": partitions, "replication_factor": replication, "configs": dict(config)}
        try:
            self._request(f"creating topic {name}", lambda client: client.create_topics({name: options}))
        except _TopicExists:
            return
        log.info("created topic %s with %d partition(s)", name, partitions)

    def ends(self, topics: Iterable[Topic], committed: bool = False) -> PartitionOffsets:
        """The offset after the last message, or after the last committed one. Only a partition's leader answers."""
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        return self._offsets(_partitions(topics), OffsetSpec.LATEST, level)

    def starts(self, topics: Iterable[Topic]) -> PartitionOffsets:
        """The first retained offset of each partition."""
        return self._offsets(_partitions(topics), OffsetSpec.EARLIEST)

    def offsets_at(self, topics: Iterable[Topic], millis: int) -> PartitionOffsets:
        """The first offset of each partition with a message of that time or later; -1 if there is none."""
        return self._offsets(_partitions(topics), millis)

    def delete_records(self, before: PartitionOffsets) -> None:
        """Remove the records before these offsets."""
        wanted = {TopicPartition(*partition): offset for partition, offset in before.items()}
        self._request("removing old records", lambda client: client.delete_records(wanted))

    def size(self, names: Iterable[str]) -> int:
        """Bytes of these topics on the brokers' disks, each partition counted once; 0 without the permission to ask."""
        wanted = list(names)
        largest: dict[tuple[str, int], int] = {}
        try:
            answers = self._request("asking for sizes", lambda client: client.describe_log_dirs(wanted))
        except LogError as error:
            if error.transient:
                raise
            return 0
        for answer in answers:
            for topic in (topic for folder in answer["log_dirs"] for topic in folder["topics"]):
                for part in topic["partitions"]:
                    partition = topic["name"], part["partition_index"]
                    largest[partition] = max(largest.get(partition, 0), part["partition_size"])
        return sum(largest.values())

    def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        with self._lock:
            if self._client is not None and self._finalizer is not None:
                self._finalizer.detach()
                self._client.close()
                self._client = None

    def _offsets(
        self,
        partitions: list[TopicPartition],
        spec: OffsetSpec | int,
        level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> PartitionOffsets:
        if not partitions:
            return {}
        wanted = dict.fromkeys(partitions, spec)
        deadline = time.monotonic() + AGREE_SECONDS
        while True:
            try:
                found = self._request("asking for offsets", lambda client: client.list_partition_offsets(wanted, level))
                break
            except LogCorrupt:
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGREE_PAUSE)
        return {
            (partition.topic, partition.partition): -1 if (at := found.get(partition)) is None else int(at.offset)
            for partition in partitions
        }

    def _request(self, doing: str, request: Callable[[KafkaAdminClient], Answer]) -> Answer:
        with self._lock:
            try:
                if self._client is None:
                    self._check_login()
                    self._client = KafkaAdminClient(**self._settings.python_options(self._timeout))
                    self._finalizer = weakref.finalize(self, _close_in_background, self._client)
                    self._finalizer.atexit = False
                return request(self._client)
            except kafka_errors.TopicAlreadyExistsError:
                raise _TopicExists("The topic exists.") from None
            except kafka_errors.KafkaError as error:
                raise _translate_error(error, doing) from None


def _close_in_background(client: KafkaAdminClient) -> None:
    """Close the client of an Admin that was not closed: its thread would keep it and its sockets open for ever.

    Runs in a separate thread, because the garbage collector may run in the client's thread, which `close` joins.
    """
    threading.Thread(target=client.close, name="kafka-close", daemon=True).start()


class _TopicExists(LogError):
    """The topic exists."""


def _translate_error(error: kafka_errors.KafkaError, doing: str) -> LogError:
    """The log's error for a kafka-python error. Shows only the error's name."""
    error_name = type(error).__name__
    if isinstance(error, _REFUSED):
        return LogError(
            f"Kafka refused access while {doing} ({error_name}).", "Check the user, its password and its ACLs."
        )
    if isinstance(error, kafka_errors.UnknownTopicOrPartitionError):
        return LogCorrupt(
            f"A topic of the log is missing, detected while {doing} ({error_name}).", "See docs/kafka.md, lost topics."
        )
    if isinstance(error, (kafka_errors.PolicyViolationError, kafka_errors.KafkaStorageError)):
        return LogFull(
            f"Kafka cannot store more, detected while {doing} ({error_name}).", "Free disk space on the brokers."
        )
    return LogLost(f"Kafka failed while {doing} ({error_name}).", "Check the brokers.")


def _partitions(topics: Iterable[Topic]) -> list[TopicPartition]:
    return [TopicPartition(topic.name, partition) for topic in topics for partition in range(topic.partitions)]


def _id_text(topic_id: str | None) -> str:
    """The topic id as Kafka's tools show it."""
    return urlsafe_b64encode(UUID(topic_id).bytes).decode().rstrip("=") if topic_id else ""

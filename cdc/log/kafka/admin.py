"""Questions to a Kafka cluster and orders to it, by kafka-python: topics, offsets, sizes, removal.

None of it is hot, and answers come as plain data in the calling thread. Messages go through librdkafka: see
`cdc.log.kafka.client`.
"""

import logging
import threading
import weakref
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from kafka import IsolationLevel, KafkaAdminClient, OffsetSpec, TopicPartition
from kafka import errors as said_by

from cdc.errors import LogCorrupt, LogError, LogFull, LogLost
from cdc.log.kafka.settings import KafkaConnectionSettings

log = logging.getLogger(__name__)
logging.getLogger("kafka").setLevel(logging.CRITICAL)  # it tells of every reconnect; what matters comes as an error

Places = Mapping[tuple[str, int], int]
"""An offset for each topic and partition."""
Answer = TypeVar("Answer")

_REFUSED = (
    said_by.AuthorizationError,
    said_by.TopicAuthorizationFailedError,
    said_by.GroupAuthorizationFailedError,
    said_by.ClusterAuthorizationFailedError,
    said_by.SaslAuthenticationFailedError,
)
_UNKNOWN_TOPIC = said_by.UnknownTopicOrPartitionError.errno


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster has it now. `id` tells a topic from another one of the same name made later."""

    name: str
    id: str
    partitions: int


class Admin:
    """Connects at the first question. Safe for several threads, one question at a time.

    `knock` is called before: it raises where we are not let in. kafka-python would try until its time is over and not
    say why.
    """

    def __init__(self, settings: KafkaConnectionSettings, patience: float, knock: Callable[[], None]) -> None:
        self._settings = settings
        self._patience = patience
        self._knock = knock
        self._client: KafkaAdminClient | None = None
        self._dropped: weakref.finalize[[KafkaAdminClient], Admin] | None = None
        self._lock = threading.Lock()

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Those of the named topics that exist."""
        asked = list(names)
        if not asked:
            return {}
        found = {}
        for answer in self._ask("looking at topics", lambda client: client.describe_topics(asked)):
            name, code = answer["name"], answer["error_code"]
            if code == _UNKNOWN_TOPIC:
                continue
            if code:
                raise _in_our_words(said_by.for_code(code)(), f"looking at topic {name}")
            found[name] = Topic(name, _id_text(answer["topic_id"]), len(answer["partitions"]))
        return found

    def names(self) -> list[str]:
        """Every topic that this user may see."""
        return sorted(self._ask("listing topics", lambda client: client.list_topics()))

    def create(self, name: str, partitions: int, replication: int, config: Mapping[str, str]) -> None:
        """Make a topic; one that is there already is left as it is."""
        options = {"num_partitions": partitions, "replication_factor": replication, "configs": dict(config)}
        try:
            self._ask(f"making topic {name}", lambda client: client.create_topics({name: options}))
        except _AlreadyThere:
            return
        log.info("made topic %s with %d partition(s)", name, partitions)

    def ends(self, topics: Iterable[Topic], committed: bool = False) -> Places:
        """The offset after the last message of each partition, or the last committed one. Only a leader answers."""
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        return self._offsets(_partitions(topics), OffsetSpec.LATEST, level)

    def starts(self, topics: Iterable[Topic]) -> Places:
        """The first offset that each partition keeps."""
        return self._offsets(_partitions(topics), OffsetSpec.EARLIEST)

    def offsets_at(self, topics: Iterable[Topic], millis: int) -> Places:
        """The first offset of each partition with a message of that time or later; -1 where there is none."""
        return self._offsets(_partitions(topics), millis)

    def delete_records(self, before: Places) -> None:
        """Remove what lies before these offsets."""
        wanted = {TopicPartition(*place): offset for place, offset in before.items()}
        self._ask("removing old records", lambda client: client.delete_records(wanted))

    def size(self, names: Iterable[str]) -> int:
        """Bytes of these topics on the brokers' disks, each partition counted once; 0 where we may not know."""
        wanted = list(names)
        largest: dict[tuple[str, int], int] = {}
        try:
            answers = self._ask("asking for sizes", lambda client: client.describe_log_dirs(wanted))
        except LogError as error:
            if error.transient:
                raise
            return 0
        for answer in answers:
            for topic in (topic for folder in answer["log_dirs"] for topic in folder["topics"]):
                for part in topic["partitions"]:
                    place = topic["name"], part["partition_index"]
                    largest[place] = max(largest.get(place, 0), part["partition_size"])
        return sum(largest.values())

    def close(self) -> None:
        """Let go of the connections; the next question makes new ones."""
        with self._lock:
            if self._client is not None and self._dropped is not None:
                self._dropped.detach()
                self._client.close()
                self._client = None

    def _offsets(
        self,
        places: list[TopicPartition],
        spec: OffsetSpec | int,
        level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> Places:
        if not places:
            return {}
        wanted = dict.fromkeys(places, spec)
        found = self._ask("asking for offsets", lambda client: client.list_partition_offsets(wanted, level))
        return {
            (place.topic, place.partition): -1 if (at := found.get(place)) is None else int(at.offset)
            for place in places
        }

    def _ask(self, doing: str, question: Callable[[KafkaAdminClient], Answer]) -> Answer:
        with self._lock:
            try:
                if self._client is None:
                    self._knock()
                    self._client = KafkaAdminClient(**self._settings.python_options(self._patience))
                    self._dropped = weakref.finalize(self, _let_go, self._client)
                    self._dropped.atexit = False
                return question(self._client)
            except said_by.TopicAlreadyExistsError:
                raise _AlreadyThere("It exists.") from None
            except said_by.KafkaError as error:
                raise _in_our_words(error, doing) from None


def _let_go(client: KafkaAdminClient) -> None:
    """Close the client of an Admin that nobody closed: its own thread would hold it, and its sockets, for ever.

    On a thread of its own, as the garbage collector may call from the client's, which `close` joins.
    """
    threading.Thread(target=client.close, name="kafka-let-go", daemon=True).start()


class _AlreadyThere(LogError):
    """The topic is there."""


def _in_our_words(error: said_by.KafkaError, doing: str) -> LogError:
    """The error that our callers know; only its name is told."""
    said = type(error).__name__
    if isinstance(error, _REFUSED):
        return LogError(f"Kafka refused us while {doing} ({said}).", "Check the user, its password and its ACLs.")
    if isinstance(error, said_by.UnknownTopicOrPartitionError):
        return LogCorrupt(
            f"A topic of the log is gone, seen while {doing} ({said}).", "See docs/kafka.md, lost topics."
        )
    if isinstance(error, (said_by.PolicyViolationError, said_by.KafkaStorageError)):
        return LogFull(f"Kafka cannot store more, seen while {doing} ({said}).", "Make room on the brokers.")
    return LogLost(f"Kafka does not answer as it should while {doing} ({said}).", "Look at the brokers.")


def _partitions(topics: Iterable[Topic]) -> list[TopicPartition]:
    return [TopicPartition(topic.name, partition) for topic in topics for partition in range(topic.partitions)]


def _id_text(topic_id: str | None) -> str:
    """As Kafka itself writes it."""
    return urlsafe_b64encode(UUID(topic_id).bytes).decode().rstrip("=") if topic_id else ""

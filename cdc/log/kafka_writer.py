"""The one writer of a Kafka log: rows and position in one Kafka transaction.

Order of an append: produce the rows, the marks and the marker, wait until every one is acknowledged, commit. The marker
names the offsets at which the rows end. As nobody else writes to the topics these are known beforehand; the
acknowledgements must confirm them, else it is aborted and done again with the marker after the rows.

Readers see committed messages only, so a crash anywhere leaves either all of it or nothing; the next writer's
`init_transactions` aborts what was open and fences whoever lives on.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Delivered

from cdc import failpoint
from cdc.errors import LogError, LogFenced, LogLost
from cdc.log.kafka_client import Cluster, in_our_words, watermarks
from cdc.log.kafka_envelope import Origin, encode
from cdc.log.kafka_position import MARK_KEY, Extent, Place, State, marker_key, recovered
from cdc.log.kafka_produce import Acknowledged, Outlet, Undelivered
from cdc.log.kafka_retention import retain
from cdc.log.kafka_schemas import KafkaSchemas
from cdc.log.kafka_settings import KafkaSettings
from cdc.log.kafka_spool import KafkaSpool, discard_leftovers
from cdc.log.kafka_tail import Tail
from cdc.log.kafka_topics import Topics
from cdc.model import LOG_SCHEMA, Entry, Lsn, Progress
from cdc.ports import Schemas

_CHUNK_ROWS = 16_384
_CHUNK_BYTES = 64 << 20
"""Rows turned into messages at once: more of them no longer gain, cost memory, and an Arrow array ends at 2 GB."""
_BACKOFF_SECONDS = 0.5
_INITIALISE_SECONDS = 60.0


class Mispredicted(Exception):
    """The rows did not come to lie where the marker says: somebody else has written to a topic."""


Fill = Callable[[Producer], None]


class KafkaWriter:
    """Appends to the topics; safe to call from several threads, one entry at a time."""

    def __init__(self, settings: KafkaSettings, database: str, aside: Path) -> None:
        self._settings = settings
        self._cluster = Cluster(settings)
        self._origin = Origin(settings.prefix, database)
        self._aside = aside
        self._position = settings.system_topic("position")
        self._lock = threading.RLock()
        self._marker = -1
        self._nexts: dict[tuple[str, int], int] = {}
        self._topics = Topics(self._cluster, settings)
        self._topics.prepare()
        discard_leftovers(aside)
        self._watch = self._cluster.consumer()
        self._producer = self._opened()
        self._state = self._recovered()
        self._topics.check(self._state.place)
        schemas = settings.system_topic("schemas")
        self._schemas = KafkaSchemas(Tail(self._cluster, schemas), self._publish_schema)
        self._topics.claim([str(table) for table in self._schemas.tables()])

    def progress(self) -> Progress:
        """What is durable."""
        return Progress(self._state.place.end, dict(self._state.marks))

    @property
    def schemas(self) -> Schemas:
        """The registry kept with this log."""
        return self._schemas

    def append(self, entry: Entry) -> None:
        """Commit one entry; ignores one that was appended before."""
        self.publish((entry.rows,), entry.end, entry.marks)

    def spool(self) -> KafkaSpool:
        """Begin a transaction too large for memory: on local disk until it is published."""
        return KafkaSpool(self, self._aside)

    def publish(self, tables: Iterable[pa.Table], end: Lsn, marks: Mapping[str, str]) -> None:
        """Commit rows, marks and the new position at once. `tables` is gone through again if a try fails."""
        with self._lock:
            if self._is_repeat(end, marks):
                return
            failpoint.reached("log.before_write")
            wanted = max(end, self._state.place.end)
            place = self._state.place

            def fill(producer: Producer) -> None:
                nonlocal place
                place = self._fill(producer, tables, wanted, marks)

            def durable() -> bool:
                return self._is_repeat(end, marks)

            self._transact(fill, durable, f"appending up to {wanted}")
            if not durable():
                self._state = State(place, {**self._state.marks, **marks})
                self._await_visible()
            failpoint.reached("log.after_append")

    @property
    def pace(self) -> float:
        """A transaction is one round trip, and costs readers nothing of their own."""
        return 0.005

    def maintain(self) -> None:
        """Remove what is old and was read by every registered consumer."""
        retain(self._settings, self._cluster)

    def close(self) -> None:
        """Let go of the connections; an open transaction is aborted by the next writer."""
        with self._lock, warnings.catch_warnings():
            # A fenced producer cannot abort any more, and says so; its successor has done it.
            warnings.simplefilter("ignore", RuntimeWarning)
            self._producer.close()
            self._watch.close()

    def _marked(self, error: KafkaError | None, message: "Delivered[bytes, bytes]") -> None:
        self._marker = -1 if error is not None else message.offset() or 0

    def _await_visible(self) -> None:
        """The broker answers a commit once it cannot be lost, and lets readers see it a moment later.

        Waiting also pays: a transaction begun before then is told to come back after 20 ms.
        """
        deadline = time.monotonic() + self._settings.patience_seconds
        while self._marker >= 0 and not self._is_visible():
            if time.monotonic() > deadline:
                raise LogLost("A committed transaction does not become visible.", "Look at the brokers.")

    def _is_visible(self) -> bool:
        try:
            return watermarks(self._watch, self._position, 0)[1] > self._marker
        except LogLost:
            return False

    def _is_repeat(self, end: Lsn, marks: Mapping[str, str]) -> bool:
        known = self._state.marks
        return end <= self._state.place.end and all(known.get(key) == value for key, value in marks.items())

    def _fill(self, producer: Producer, tables: Iterable[pa.Table], end: Lsn, marks: Mapping[str, str]) -> Place:
        now = datetime.now(UTC)
        outlet = Outlet(producer, self._settings)
        newest, first = self._state.place.newest, 0
        for table in tables:
            for rows in _chunks(_checked(table)):
                newest = max(newest, pc.max(pc.cast(rows.column("commit_ts"), pa.int64())).as_py())
                for messages in encode(rows, self._origin, now, first):
                    outlet.produce(self._topics.of(messages.table), messages)
                first += rows.num_rows
        ends = outlet.predicted(self._nexts)
        if ends is None:
            ends = outlet.settle(self._settings.patience_seconds)
        failpoint.reached("log.before_position")
        place = Place(-1, end, newest, self._extents(ends))
        for name, value in marks.items():
            producer.produce(self._position, value.encode(), MARK_KEY + name.encode(), 0)
        producer.produce(self._position, place.encoded(), marker_key(now), 0, on_delivery=self._marked)
        if outlet.settle(self._settings.patience_seconds) != ends:
            raise Mispredicted
        self._expect(ends)
        failpoint.reached("log.before_commit")
        return place

    def _expect(self, ends: Acknowledged) -> None:
        """Where each partition will go on: behind the rows, and behind the record with which the commit ends them."""
        for topic, partitions in ends.items():
            for partition, end in partitions.items():
                self._nexts[topic.name, partition] = end + 1

    def _extents(self, acknowledged: Acknowledged) -> dict[str, Extent]:
        extents = dict(self._state.place.topics)
        for topic, ends in acknowledged.items():
            known = extents.get(topic.name, Extent(topic.id, (0,) * topic.partitions))
            extents[topic.name] = Extent(
                known.id, tuple(ends.get(partition, end) for partition, end in enumerate(known.ends))
            )
        return extents

    def _publish_schema(self, key: bytes, value: bytes) -> None:
        topic = self._settings.system_topic("schemas")
        with self._lock:
            self._transact(lambda producer: producer.produce(topic, value, key, 0), lambda: False, "storing a schema")

    def _transact(self, fill: Fill, durable: Callable[[], bool], doing: str) -> None:
        """Run one Kafka transaction until it is committed or cannot be.

        After a failed commit nobody knows whether it counts: a new producer makes the broker finish it one way or the
        other, and the position topic tells which (`durable`).
        """
        deadline = time.monotonic() + self._settings.patience_seconds
        while True:
            try:
                self._producer.begin_transaction()
                fill(self._producer)
                self._commit(deadline)
                return
            except Mispredicted:
                self._nexts.clear()
                if self._abort():
                    continue
                failure = KafkaError(KafkaError._STATE)
            except Undelivered as error:
                failure = error.reason
            except KafkaException as error:
                failure = error.args[0]
            except BaseException:
                self._nexts.clear()
                self._abort()
                raise
            self._nexts.clear()
            self._give_up_if_hopeless(failure, doing, deadline)
            if not self._abort():
                self._reopen(deadline)
                if durable():
                    return
            self._topics.check(self._state.place)
            time.sleep(_BACKOFF_SECONDS)

    def _commit(self, deadline: float) -> None:
        while True:
            try:
                self._producer.commit_transaction(10.0)
                return
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise

    def _abort(self) -> bool:
        """False if this producer cannot go on."""
        try:
            self._producer.purge()
            self._producer.abort_transaction(30.0)
        except KafkaException as error:
            if in_our_words(error.args[0], "aborting").__class__ is LogFenced:
                raise in_our_words(error.args[0], "aborting") from None
            return False
        return True

    def _give_up_if_hopeless(self, failure: KafkaError, doing: str, deadline: float) -> None:
        said = in_our_words(failure, doing)
        if not said.transient or time.monotonic() > deadline:
            if not isinstance(said, LogFenced):
                self._abort()
            raise said

    def _reopen(self, deadline: float) -> None:
        while True:
            try:
                self._producer = self._opened()
                self._state = self._recovered()
                return
            except LogLost:
                if time.monotonic() > deadline:
                    raise

    def _opened(self) -> Producer:
        settings = self._settings
        options: dict[str, str | int | float | bool] = {
            "transactional.id": settings.system_topic("writer"),
            "transaction.timeout.ms": settings.transaction_timeout_seconds * 1000,
            "message.max.bytes": settings.max_message_bytes,
            "compression.type": settings.compression,
            "linger.ms": 5,
            "batch.num.messages": 10_000,
            "queue.buffering.max.messages": 100_000,
            "queue.buffering.max.kbytes": 32 << 10,
        }
        producer = self._cluster.producer(**options)
        try:
            producer.init_transactions(min(_INITIALISE_SECONDS, settings.patience_seconds))
        except KafkaException as error:
            raise in_our_words(error.args[0], "becoming the log's writer") from None
        return producer

    def _recovered(self) -> State:
        """Read the position back. Only after `init_transactions`: it settles what an earlier writer left open."""
        tail = Tail(self._cluster, self._position)
        messages = tail.drain()
        tail.close()
        return recovered(messages)


def _chunks(rows: pa.Table) -> Iterator[pa.Table]:
    if rows.num_rows > _CHUNK_ROWS or (rows.num_rows > 1 and rows.nbytes > _CHUNK_BYTES):
        half = rows.num_rows // 2
        yield from _chunks(rows.slice(0, half))
        yield from _chunks(rows.slice(half))
    elif rows.num_rows:
        yield rows


def _checked(rows: pa.Table) -> pa.Table:
    if rows.schema.equals(LOG_SCHEMA):
        return rows
    try:
        return rows.select(LOG_SCHEMA.names).cast(LOG_SCHEMA)
    except (KeyError, ValueError, pa.ArrowInvalid):
        raise LogError("Rows for the log do not have its schema.", "This is a fault in the caller.") from None

"""The one writer of a Kafka log: rows and position in one Kafka transaction.

Order of an append: produce the rows, the marks and the marker, wait until every one is acknowledged where it should be,
commit. The marker names the offsets at which the rows end. As nobody else writes to the topics these are known
beforehand; the acknowledgements must confirm them, else it is aborted and done again.

Readers see committed messages only, so a crash anywhere leaves either all of it or nothing.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Producer

from cdc import failpoint
from cdc.errors import LogError, LogLost
from cdc.log.kafka.client import Cluster, watermarks
from cdc.log.kafka.envelope.encode import FEW, Origin, encode
from cdc.log.kafka.position import MARK_KEY, DurableState, KafkaPosition, TopicExtent, marker_key, recovered
from cdc.log.kafka.retention import TopicRetention
from cdc.log.kafka.schemas import KafkaSchemas
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.topic_tail import TopicTail
from cdc.log.kafka.topics import Topics
from cdc.log.kafka.write.offsets import Ends, Offsets
from cdc.log.kafka.write.producer import TransactionProducer
from cdc.log.kafka.write.spool import KafkaSpool, discard_leftovers
from cdc.log.kafka.write.transaction import Transactions
from cdc.model import LOG_SCHEMA, Entry, Lsn, Progress
from cdc.ports import Schemas

_CHUNK_ROWS = 8_192
_CHUNK_BYTES = 32 << 20
"""Rows turned into messages at once: more of them no longer gain, cost memory, and an Arrow array ends at 2 GB."""


class KafkaWriter:
    """Appends to the topics; safe to call from several threads, one entry at a time."""

    def __init__(self, settings: KafkaSettings, database: str, aside: Path) -> None:
        self._settings = settings
        self._cluster = Cluster(settings)
        self._origin = Origin(settings.prefix, database)
        self._aside = aside
        self._lock = threading.RLock()
        self._marker = -1
        self._offsets = Offsets(self._cluster)
        self._topics = Topics(self._cluster, settings)
        self._topics.prepare()
        self._position = self._topics.system("position")
        discard_leftovers(aside)
        self._watch = self._cluster.consumer()
        self._retention = TopicRetention(settings, self._cluster)
        self._transactions = Transactions(self._cluster, settings, self._offsets, self._check)
        self._state = self._recovered()
        self._topics.check(self._state.place)
        schemas = settings.system_topic("schemas")
        self._schemas = KafkaSchemas(TopicTail(self._cluster, schemas), self._publish_schema)
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
                self._state = self._recovered()
                return self._is_repeat(end, marks)

            self._transactions.run(fill, durable, f"appending up to {wanted}")
            if not self._is_repeat(end, marks):
                self._state = DurableState(place, {**self._state.marks, **marks})
                self._await_visible()
            failpoint.reached("log.after_append")

    @property
    def pace(self) -> float:
        """A transaction is one round trip, and costs readers nothing of their own."""
        return 0.005

    def maintain(self) -> None:
        """Remove what is old and was read by every registered consumer."""
        self._retention.run()

    def close(self) -> None:
        """Let go of the connections; an open transaction is aborted by the next writer."""
        with self._lock:
            self._transactions.close()
            self._watch.close()
            self._retention.close()
            self._cluster.admin.close()

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
            return watermarks(self._watch, self._position.name, 0)[1] > self._marker
        except LogLost:
            return False

    def _is_repeat(self, end: Lsn, marks: Mapping[str, str]) -> bool:
        known = self._state.marks
        return end <= self._state.place.end and all(known.get(key) == value for key, value in marks.items())

    def _fill(
        self, producer: Producer, tables: Iterable[pa.Table], end: Lsn, marks: Mapping[str, str]
    ) -> KafkaPosition:
        now = datetime.now(UTC)
        outlet = TransactionProducer(producer, self._settings, self._offsets, self._topics.system("oversize"))
        newest, first = self._state.place.newest, 0
        for table in tables:
            for rows in _chunks(_checked(table)):
                newest = max(newest, pc.max(rows.column("commit_ts")).value)
                for messages in encode(rows, self._origin, now, first):
                    outlet.produce(self._topics.of(messages.table), messages)
                first += rows.num_rows
        failpoint.reached("log.before_position")
        place = KafkaPosition(-1, end, newest, self._extents(outlet.ends()))
        for name, value in marks.items():
            outlet.put(self._position, MARK_KEY + name.encode(), value.encode())
        outlet.put(self._position, marker_key(now), place.encoded())
        outlet.settle(self._settings.patience_seconds)
        ends = outlet.ends()
        self._marker = ends[self._position][0] - 1
        self._offsets.expect(ends)
        failpoint.reached("log.before_commit")
        return place

    def _extents(self, written: Ends) -> dict[str, TopicExtent]:
        extents = dict(self._state.place.topics)
        for topic, ends in written.items():
            if not self._topics.is_of_a_table(topic):
                continue
            known = extents.get(topic.name, TopicExtent(topic.id, (0,) * topic.partitions))
            extents[topic.name] = TopicExtent(
                known.id, tuple(ends.get(partition, end) for partition, end in enumerate(known.ends))
            )
        return extents

    def _publish_schema(self, key: bytes, value: bytes) -> None:
        topic = self._topics.system("schemas")

        def fill(producer: Producer) -> None:
            outlet = TransactionProducer(producer, self._settings, self._offsets, topic)
            outlet.put(topic, key, value)
            outlet.settle(self._settings.patience_seconds)
            self._offsets.expect(outlet.ends())

        with self._lock:
            self._transactions.run(fill, lambda: False, "storing a schema")

    def _check(self) -> None:
        """A topic that was deleted or altered meanwhile must stop us."""
        self._topics.check(self._state.place)

    def _recovered(self) -> DurableState:
        """Read the position back. Only after `init_transactions`: it settles what an earlier writer left open."""
        tail = TopicTail(self._cluster, self._position.name)
        try:
            return recovered(tail.follow())
        finally:
            tail.close()


def _chunks(rows: pa.Table) -> Iterator[pa.Table]:
    # What the buffers hold as a whole is known at once; what of it belongs to these rows takes longer to find out.
    if 0 < rows.num_rows <= FEW and rows.get_total_buffer_size() <= _CHUNK_BYTES:
        yield rows
    elif rows.num_rows > _CHUNK_ROWS or (rows.num_rows > 1 and rows.nbytes > _CHUNK_BYTES):
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

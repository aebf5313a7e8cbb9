"""The writer of a Kafka log: rows and position in one Kafka transaction.

Order of an append: produce the rows, the marks and the position marker; wait until all are acknowledged at the expected
offsets; commit. The marker has the offsets at which the rows end. They are known beforehand, because no other process
writes to the topics; if the acknowledgements differ, the transaction is aborted and retried.

Readers see committed messages only, so after a crash they see either the whole append or nothing.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Producer

from cdc import failpoint
from cdc.errors import LogError, LogLost
from cdc.log.kafka.client import Cluster, watermarks
from cdc.log.kafka.envelope.encode import FEW_ROWS, Origin, encode
from cdc.log.kafka.position import MARK_KEY, DurableState, KafkaPosition, TopicExtent, marker_key, recover_state
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
"""Rows encoded at once: more would cost memory without being faster, and an Arrow array is limited to 2 GB."""


class KafkaWriter:
    """Appends to the topics. Safe to call from several threads; appends one entry at a time."""

    def __init__(self, settings: KafkaSettings, database: str, spool_folder: Path) -> None:
        self._settings = settings
        self._cluster = Cluster(settings)
        self._origin = Origin(settings.prefix, database)
        self._spool_folder = spool_folder
        self._lock = threading.RLock()
        self._marker = -1
        self._offsets = Offsets(self._cluster)
        self._topics = Topics(self._cluster, settings)
        self._topics.prepare()
        self._position = self._topics.system("position")
        discard_leftovers(spool_folder)
        self._visibility_consumer = self._cluster.consumer()
        self._retention = TopicRetention(settings, self._cluster)
        self._transactions = Transactions(self._cluster, settings, self._offsets, self._check)
        self._state = self._read_state()
        self._topics.check(self._state.position)
        schemas = settings.system_topic("schemas")
        self._schemas = KafkaSchemas(TopicTail(self._cluster, schemas, created=True), self._publish_schema)
        self._topics.register([str(table) for table in self._schemas.tables()])

    def progress(self) -> Progress:
        """The durable position and marks."""
        return Progress(self._state.position.end, dict(self._state.marks))

    @property
    def schemas(self) -> Schemas:
        """The schema registry of this log."""
        return self._schemas

    def append(self, entry: Entry) -> None:
        """Commit one entry. Ignores an entry that the log already has."""
        self._publish((entry.rows,), entry.end, entry.marks)

    def spool(self) -> KafkaSpool:
        """Begin a transaction that is too large for memory; it stays on local disk until it is published."""
        return KafkaSpool(partial(self._publish, marks={}), self._spool_folder)

    def _publish(self, tables: Iterable[pa.Table], end: Lsn, marks: Mapping[str, str]) -> None:
        """Commit rows, marks and the new position in one transaction. A retry iterates `tables` again."""
        with self._lock:
            if self._is_repeat(end, marks):
                return
            failpoint.reached("log.before_write")
            wanted = max(end, self._state.position.end)
            position = self._state.position

            def fill(producer: Producer) -> None:
                nonlocal position
                position = self._fill(producer, tables, wanted, marks)

            def durable() -> bool:
                self._state = self._read_state()
                return self._is_repeat(end, marks)

            self._transactions.run(fill, durable, f"appending up to {wanted}")
            if not self._is_repeat(end, marks):
                self._state = DurableState(position, {**self._state.marks, **marks})
                self._await_visible()
            failpoint.reached("log.after_append")

    @property
    def append_interval(self) -> float:
        """An append costs one round trip and no extra work for readers."""
        return 0.005

    def maintain(self) -> None:
        """Remove old messages that every registered consumer has read."""
        self._retention.run()

    def close(self) -> None:
        """Close the connections. The next writer aborts an open transaction."""
        with self._lock:
            self._transactions.close()
            self._visibility_consumer.close()
            self._retention.close()
            self._cluster.admin.close()

    def _await_visible(self) -> None:
        """Wait until readers can see the commit: the broker acknowledges it earlier, as soon as it is durable.

        Waiting is also faster: the broker makes a transaction that begins before then retry after 20 ms.
        """
        deadline = time.monotonic() + self._settings.patience_seconds
        while self._marker >= 0 and not self._is_visible():
            if time.monotonic() > deadline:
                raise LogLost("A committed transaction does not become visible.", "Check the brokers.")

    def _is_visible(self) -> bool:
        try:
            return watermarks(self._visibility_consumer, self._position.name, 0)[1] > self._marker
        except LogLost:
            return False

    def _is_repeat(self, end: Lsn, marks: Mapping[str, str]) -> bool:
        known = self._state.marks
        return end <= self._state.position.end and all(known.get(key) == value for key, value in marks.items())

    def _fill(
        self, producer: Producer, tables: Iterable[pa.Table], end: Lsn, marks: Mapping[str, str]
    ) -> KafkaPosition:
        now = datetime.now(UTC)
        transaction = TransactionProducer(producer, self._settings, self._offsets, self._topics.system("oversize"))
        newest, first = self._state.position.newest, 0
        for table in tables:
            for rows in _chunks(_checked(table)):
                newest = max(newest, pc.max(rows.column("commit_ts")).value)
                for messages in encode(rows, self._origin, now, first):
                    transaction.produce(self._topics.of(messages.table), messages)
                first += rows.num_rows
        failpoint.reached("log.before_position")
        position = KafkaPosition(-1, end, newest, self._extents(transaction.ends()))
        for name, value in marks.items():
            transaction.produce_one(self._position, MARK_KEY + name.encode(), value.encode())
        transaction.produce_one(self._position, marker_key(now), position.encoded())
        transaction.await_acknowledgements(self._settings.patience_seconds)
        ends = transaction.ends()
        self._marker = ends[self._position][0] - 1
        self._offsets.advance(ends)
        failpoint.reached("log.before_commit")
        return position

    def _extents(self, written: Ends) -> dict[str, TopicExtent]:
        extents = dict(self._state.position.topics)
        for topic, ends in written.items():
            if not self._topics.is_table_topic(topic):
                continue
            known = extents.get(topic.name, TopicExtent(topic.id, (0,) * topic.partitions))
            extents[topic.name] = TopicExtent(
                known.id, tuple(ends.get(partition, end) for partition, end in enumerate(known.ends))
            )
        return extents

    def _publish_schema(self, key: bytes, value: bytes) -> None:
        topic = self._topics.system("schemas")

        def fill(producer: Producer) -> None:
            transaction = TransactionProducer(producer, self._settings, self._offsets, topic)
            transaction.produce_one(topic, key, value)
            transaction.await_acknowledgements(self._settings.patience_seconds)
            self._offsets.advance(transaction.ends())

        with self._lock:
            self._transactions.run(fill, lambda: False, "storing a schema")

    def _check(self) -> None:
        """Raise if a topic was deleted or altered meanwhile."""
        self._topics.check(self._state.position)

    def _read_state(self) -> DurableState:
        """Read the durable state. Only after `init_transactions`, which ends an earlier writer's transaction."""
        tail = TopicTail(self._cluster, self._position.name, created=True)
        try:
            return recover_state(tail.follow())
        finally:
            tail.close()


def _chunks(rows: pa.Table) -> Iterator[pa.Table]:
    # The total size of the buffers is known at once; `nbytes`, the part that belongs to these rows, takes longer.
    if 0 < rows.num_rows <= FEW_ROWS and rows.get_total_buffer_size() <= _CHUNK_BYTES:
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
        raise LogError("Rows for the log do not have its schema.", "This is a bug in the caller.") from None

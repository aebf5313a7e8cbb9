"""Rows, settings and a plain consumer for the tests of logs in Kafka."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, TopicPartition

from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.write.writer import KafkaWriter
from cdc.model import LOG_SCHEMA, Entry, Lsn

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)


def change(number: int, lsn: int, op: str = "u", table: str = "public.orders", note: str = "") -> dict[str, object]:
    """A change of row `number`, its transaction ending at `lsn`."""
    after = json.dumps({"id": number, "note": note or f"at {lsn}"}, separators=(",", ":"))
    return {
        "table": table, "op": op, "key": f'{{"id":{number}}}', "after": None if op == "d" else after, "before": None,
        "unchanged": None, "version": lsn, "commit_lsn": lsn, "ordinal": number, "xid": lsn, "commit_ts": NOW,
        "schema_id": 1,
    }  # fmt: skip


def entry(lsn: int, *rows: dict[str, object], marks: dict[str, str] | None = None) -> Entry:
    """One transaction ending at `lsn`."""
    return Entry(pa.Table.from_pylist(list(rows), schema=LOG_SCHEMA), Lsn(lsn), marks or {})


def batch(lsn: int, count: int, table: str = "public.orders") -> Entry:
    """A transaction of so many rows."""
    return entry(lsn, *(change(number, lsn, table=table) for number in range(count)))


def writer(settings: KafkaSettings, folder: Path) -> KafkaWriter:
    """A writer on the topics of these settings."""
    return KafkaWriter(settings, "store", folder / "kafka")


Seen = list[tuple[int, int, bytes | None, bytes | None]]


def messages(bootstrap: str, topic: str, partitions: int = 1, least: int = 1) -> Seen:
    """(partition, offset, key, value) of everything committed, as any other program would read it."""
    deadline = time.monotonic() + 30
    while len(found := _messages(bootstrap, topic, partitions)) < least and time.monotonic() < deadline:
        pass
    return found


def _messages(bootstrap: str, topic: str, partitions: int) -> Seen:
    options = {"bootstrap.servers": bootstrap, "group.id": "plain", "enable.partition.eof": True,
               "auto.offset.reset": "earliest", "enable.auto.commit": False}  # fmt: skip
    consumer = Consumer(options)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    found = []
    ended: set[int] = set()
    while len(ended) < partitions:
        for message in consumer.consume(1000, 1.0):
            error = message.error()
            if error is None:
                found.append((message.partition() or 0, message.offset() or 0, message.key(), message.value()))
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition() or 0)
    consumer.close()
    return found

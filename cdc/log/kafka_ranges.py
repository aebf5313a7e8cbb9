"""Reads given ranges of partitions, all of them and nothing else, and turns them into rows.

A range that the broker no longer has is an error, never a jump: `auto.offset.reset` is `error` and the first kept
offset is compared before reading.
"""

import base64
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from cdc.errors import LogCorrupt, LogLost
from cdc.log.kafka_client import CALL_SECONDS, Cluster, available, in_our_words, speaking, watermarks
from cdc.log.kafka_decode import Decoded, NotAnEnvelope, decode
from cdc.log.kafka_produce import PART_OPENS

log = logging.getLogger(__name__)

_SILENCE_SECONDS = 30.0

Decode = Callable[[Sequence["Record"]], Decoded]
"""Turns records of one partition into rows. Raises NotAnEnvelope."""
Record = tuple[int, bytes, bytes]
"""Offset, key, value."""


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets `start` up to, not including, `end` of one partition. `start` None: whatever is kept."""

    topic: str
    partition: int
    start: int | None
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one range, each with its offset and its number within its entry."""

    range: Range
    rows: pa.Table
    offsets: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]


def envelopes(records: Sequence[Record]) -> Decoded:
    """Records that our own writer made."""
    keys = pa.array([key for _, key, _ in records], pa.binary())
    return decode(keys, pa.array([value for _, _, value in records], pa.binary()))


@dataclass(slots=True)
class _Reading:
    range: Range
    start: int
    over: bool
    records: list[Record] = field(default_factory=list)


class RangeReader:
    """Keeps its connection from one call to the next: making one costs more than reading a small batch."""

    def __init__(self, cluster: Cluster, decoded: Decode = envelopes) -> None:
        self._cluster = cluster
        self._decoded = decoded
        self._consumer: Consumer | None = None
        self._introduced: set[str] = set()

    def read(self, ranges: Iterable[Range]) -> list[Part]:
        """Each range that has rows, in the order of the ranges."""
        wanted = [item for item in ranges if item.start is None or item.start < item.end]
        if not wanted:
            return []
        if self._consumer is None:
            # An empty fetch is answered after this long: it bounds how late the end of a range is noticed.
            self._consumer = self._cluster.consumer(**{"fetch.wait.max.ms": 20, "fetch.error.backoff.ms": 20})
        try:
            self._introduce(self._consumer, {item.topic for item in wanted})
            records = _records(self._consumer, wanted)
        except BaseException:
            self.close()
            raise
        foreign = self._cluster.settings.foreign
        parts = (_part(records[item.topic, item.partition], item, foreign, self._decoded) for item in wanted)
        return [part for part in parts if part.rows.num_rows]

    def close(self) -> None:
        """Let go of the connection; the next read makes a new one."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
            self._introduced.clear()

    def _introduce(self, consumer: Consumer, topics: set[str]) -> None:
        """A consumer that does not know where a topic is looks for it once a second only."""
        for topic in topics - self._introduced:
            with speaking(f"asking for the leaders of {topic}"):
                consumer.list_topics(topic, CALL_SECONDS)
            self._introduced.add(topic)


def _records(consumer: Consumer, ranges: list[Range]) -> Mapping[tuple[str, int], list[Record]]:
    reading = {}
    for item in ranges:
        start = watermarks(consumer, item.topic, item.partition)[0] if item.start is None else item.start
        reading[item.topic, item.partition] = _Reading(item, start, start >= item.end)
    starts = [
        TopicPartition(part.range.topic, part.range.partition, part.start) for part in reading.values() if not part.over
    ]
    consumer.assign(starts)
    left = len(starts)
    quiet_until = time.monotonic() + _SILENCE_SECONDS
    while left:
        messages = available(consumer, 0.2)
        for message in messages:
            left -= _take(reading[message.topic() or "", message.partition() or 0], message, consumer)
        if any(message.error() is None for message in messages):
            quiet_until = time.monotonic() + _SILENCE_SECONDS
        elif time.monotonic() > quiet_until:
            for part in reading.values():
                _refuse_lost(part, consumer)
            raise LogLost("Kafka delivered nothing for half a minute.", "Look at the brokers.")
    consumer.unassign()
    return {place: part.records for place, part in reading.items()}


def _take(part: _Reading, message: "Message[bytes, bytes]", consumer: Consumer) -> int:
    """Keep one message; 1 if its partition is complete now."""
    if part.over:
        return 0
    error, offset = message.error(), message.offset() or 0
    if error is None:
        value = message.value()
        if offset < part.range.end and value is not None:
            part.records.append((offset, message.key() or b"null", value))
        part.over = offset >= part.range.end - 1
    elif error.code() == KafkaError._PARTITION_EOF:
        # Below the end: the commit is on its way to this partition.
        part.over = offset >= part.range.end
    elif not error.retriable():
        _refuse_lost(part, consumer)
        raise in_our_words(error, f"reading {message.topic()}-{message.partition()}")
    return int(part.over)


def _refuse_lost(part: _Reading, consumer: Consumer) -> None:
    """Say what is missing, if something is."""
    place = f"{part.range.topic}-{part.range.partition}"
    low, high = watermarks(consumer, part.range.topic, part.range.partition)
    if part.start < low:
        raise LogCorrupt(
            f"Retention removed offsets {part.start} to {low - 1} of {place} before they were read.",
            "Start the reader anew from a snapshot (millrace resync), and raise log.retention_hours.",
        )
    if part.range.end > high:
        raise LogCorrupt(
            f"{place} ends at offset {high}, but the log's position says {part.range.end}: messages are gone.",
            "The topic was deleted, made again or restored from an older copy: start with a new prefix and snapshot.",
        )


def _part(records: list[Record], item: Range, foreign: str, decoded: Decode) -> Part:
    if any(value.startswith(PART_OPENS) for _, _, value in records):
        records = _joined(records, item)
    try:
        found = decoded(records)
    except NotAnEnvelope as error:
        if foreign == "stop":
            raise _named(records[error.row][0], item) from None
        records = _without_foreign(records, item, decoded)
        found = decoded(records)
    offsets = found.offsets if found.offsets is not None else np.array([offset for offset, _, _ in records], np.int64)
    return Part(item, found.rows, offsets, found.numbers)


def _without_foreign(records: list[Record], item: Range, decoded: Decode) -> list[Record]:
    kept = []
    for record in records:
        try:
            decoded([record])
            kept.append(record)
        except NotAnEnvelope:
            log.warning(
                "skipped a message that is not a change: %s-%d offset %d", item.topic, item.partition, record[0]
            )
    return kept


def _named(offset: int, item: Range) -> LogCorrupt:
    return LogCorrupt(
        f"The message at offset {offset} of {item.topic}-{item.partition} is not a change of this log.",
        "Find who writes to the topic; log.foreign: skip leaves such messages out.",
    )


def _joined(records: list[Record], item: Range) -> list[Record]:
    """Put changes that were spread over several messages together again."""
    whole: list[Record] = []
    pieces: list[bytes] = []
    for offset, key, value in records:
        if not value.startswith(PART_OPENS):
            whole.append((offset, key, value))
            continue
        try:
            data = json.loads(value)
            number, of = data["millrace_part"]["part"], data["millrace_part"]["of"]
            if number != len(pieces) or not 0 < of <= 1 << 20:
                raise ValueError("out of order")
            pieces.append(base64.b64decode(data["data"], validate=True))
        except (ValueError, KeyError, TypeError):
            raise _named(offset, item) from None
        if len(pieces) == of:
            whole.append((offset, key, b"".join(pieces)))
            pieces = []
    return whole

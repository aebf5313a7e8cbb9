"""Receives the messages of some partitions and decodes them in chunks.

A chunk is decoded while its bytes are in the CPU cache: decoding 50,000 messages at once costs twice the CPU. Messages
received beyond the end of a range are kept for the next range; only prefetching decodes them early.
"""

import base64
import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from cdc.errors import LogCorrupt
from cdc.log.kafka.client import poll_messages
from cdc.log.kafka.envelope.decode import Decoded, NotAnEnvelope
from cdc.log.kafka.write.producer import PART_OPENS
from cdc.model import LOG_SCHEMA

log = logging.getLogger(__name__)

_CHUNK = 8_192
"""Messages decoded at once: some megabytes, which fit into the CPU cache."""

Decode = Callable[[Sequence["Record"]], Decoded]
"""Decodes the records of one partition to rows. Raises NotAnEnvelope."""
Record = tuple[int, bytes, bytes]
"""Offset, key, value."""
Address = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `start` up to, not including, `end` of one partition. `start` None: from the first retained offset."""

    topic: str
    partition: int
    start: int | None
    end: int

    @property
    def address(self) -> Address:
        """Topic and partition."""
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class RangeRows:
    """The rows of one range, each with its offset and its number within its entry.

    `range` is shorter than what was asked for if that ends between the messages of one change.
    """

    range: OffsetRange
    rows: pa.Table
    offsets: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]


class RefusedByBroker(Exception):
    """A broker's error for a partition that a retry will not resolve."""

    def __init__(self, address: Address, error: KafkaError) -> None:
        super().__init__(address)
        self.address = address
        self.error = error


@dataclass(slots=True)
class _PartitionFeed:
    """One partition. Everything up to offset `seen` was received, everything up to `taken` was returned."""

    address: Address
    seen: int
    taken: int
    records: list[Record] = field(default_factory=list)
    chunks: list[Decoded] = field(default_factory=list)

    def add(self, message: "Message[bytes, bytes]") -> int:
        """Add one message; returns its size in bytes. Skips tombstones: the delete before has the same information."""
        error, offset = message.error(), message.offset() or 0
        if error is None:
            self.seen = offset + 1
            value = message.value()
            if value is not None:
                self.records.append((offset, message.key() or b"null", value))
                return len(value)
        elif error.code() == KafkaError._PARTITION_EOF:
            self.seen = max(self.seen, offset)
        elif not error.retriable():
            raise RefusedByBroker(self.address, error)
        return 0

    def decode(self, below: int, least: int, decoder: "_Decoder") -> None:
        """Decode the whole changes below an offset if there are at least `least`. An error leaves them undecoded."""
        cut = _whole(self.records, bisect_left(self.records, below, key=lambda record: record[0]))
        if cut < least or not cut:
            return
        self.chunks.append(decoder(self.records[:cut], self.address))
        del self.records[:cut]

    def take(self, item: OffsetRange, decoder: "_Decoder") -> RangeRows:
        """The rows of a range that was received."""
        self.decode(item.end, 0, decoder)
        found: list[Decoded] = []
        while self.chunks:
            chunk = self.chunks[0]
            cut = int(np.searchsorted(_offsets(chunk), item.end))
            found.append(_slice(chunk, 0, cut))
            if cut < chunk.rows.num_rows:
                self.chunks[0] = _slice(chunk, cut, chunk.rows.num_rows)
                break
            del self.chunks[0]
        self.taken = min([item.end, *(offset for offset, _, _ in self.records[:1])])  # the rest of a change is there
        return _range_rows(replace(item, end=self.taken), found)


@dataclass(frozen=True, slots=True)
class _Decoder:
    decoded: Decode
    foreign: str

    def __call__(self, records: Sequence[Record], address: Address) -> Decoded:
        if any(map(_is_part, records)):
            records = _join_parts(records, address)
        try:
            return _with_offsets(self.decoded(records), records)
        except NotAnEnvelope as error:
            if self.foreign == "stop":
                raise _foreign_message(records[error.row][0], address) from None
        records = self._without_foreign(records, address)
        return _with_offsets(self.decoded(records), records)

    def _without_foreign(self, records: Sequence[Record], address: Address) -> list[Record]:
        kept = []
        for record in records:
            try:
                self.decoded([record])
                kept.append(record)
            except NotAnEnvelope:
                log.warning("skipped a message that is not a change: %s-%d offset %d", *address, record[0])
        return kept


class Feed:
    """Partitions that a consumer receives from given offsets on: none at first. Not for two threads at once."""

    def __init__(self, consumer: Consumer, decoded: Decode, foreign: str) -> None:
        self._consumer = consumer
        self._decoder = _Decoder(decoded, foreign)
        self._partitions: dict[Address, _PartitionFeed] = {}
        self._received_bytes = 0
        consumer.unassign()

    def continued(self, ranges: Sequence[OffsetRange]) -> set[Address]:
        """The partitions whose range starts exactly where their last one ended."""
        found = ((item, self._partitions.get(item.address)) for item in ranges)
        return {item.address for item, partition in found if partition is not None and partition.taken == item.start}

    def assign(self, starts: Mapping[Address, int], continued: Collection[Address]) -> None:
        """Receive these partitions from these offsets on; those in `continued` go on.

        Of the others, one that had no message since goes on as well: it was idle. One with messages that nobody asked
        for is read by another task now.
        """
        moved = [
            address
            for address, partition in self._partitions.items()
            if address in starts or (address not in continued and (partition.records or partition.chunks))
        ]
        if moved:
            self._consumer.incremental_unassign([TopicPartition(*address) for address in moved])
            for address in moved:
                del self._partitions[address]
        if starts:
            self._partitions |= {address: _PartitionFeed(address, start, start) for address, start in starts.items()}
            self._consumer.incremental_assign([TopicPartition(*address, start) for address, start in starts.items()])

    def poll(self, seconds: float) -> bool:
        """Receive available messages, or wait for the first one; False if none came. Raises RefusedByBroker."""
        messages = poll_messages(self._consumer, seconds)
        only = next(iter(self._partitions.values())) if len(self._partitions) == 1 else None
        for message in messages:
            partition = only or self._partitions[message.topic() or "", message.partition() or 0]
            self._received_bytes += partition.add(message)
        return any(message.error() is None for message in messages)

    def covers(self, ranges: Sequence[OffsetRange]) -> bool:
        """Whether these ranges were received completely. Decodes full chunks of them."""
        for item in ranges:
            self._partitions[item.address].decode(item.end, _CHUNK, self._decoder)
        return all(self._partitions[item.address].seen >= item.end for item in ranges)

    def decode(self) -> None:
        """Decode full chunks of the messages beyond the requested ranges."""
        for partition in self._partitions.values():
            partition.decode(partition.seen, _CHUNK, self._decoder)

    def take(self, item: OffsetRange) -> RangeRows:
        """The rows of a range that was received."""
        return self._partitions[item.address].take(item, self._decoder)

    @property
    def prefetched(self) -> int:
        """How many offsets were received beyond those returned."""
        return sum(partition.seen - partition.taken for partition in self._partitions.values())

    def take_received_bytes(self) -> int:
        """Bytes of values received since the last call."""
        received, self._received_bytes = self._received_bytes, 0
        return received


def _offsets(chunk: Decoded) -> npt.NDArray[np.int64]:
    assert chunk.offsets is not None  # see _with_offsets
    return chunk.offsets


def _with_offsets(found: Decoded, records: Sequence[Record]) -> Decoded:
    if found.offsets is not None:
        return found
    return Decoded(found.rows, found.numbers, np.array([offset for offset, _, _ in records], np.int64))


def _slice(chunk: Decoded, low: int, high: int) -> Decoded:
    return Decoded(chunk.rows.slice(low, high - low), chunk.numbers[low:high], _offsets(chunk)[low:high])


def _range_rows(item: OffsetRange, found: Sequence[Decoded]) -> RangeRows:
    rows = pa.concat_tables([LOG_SCHEMA.empty_table(), *(chunk.rows for chunk in found if chunk.rows.num_rows)])
    none = np.zeros(0, np.int64)
    offsets = np.concatenate([none, *map(_offsets, found)])
    return RangeRows(item, rows, offsets, np.concatenate([none, *(chunk.numbers for chunk in found)]))


def _is_part(record: Record) -> bool:
    return record[2].startswith(PART_OPENS)


def _whole(records: Sequence[Record], cut: int) -> int:
    """The number of records before a cut, without the first messages of a change that the cut divides."""
    if not cut or not _is_part(records[cut - 1]):
        return cut
    try:
        part = json.loads(records[cut - 1][2])["millrace_part"]
        return cut if part["part"] + 1 == part["of"] else max(cut - part["part"] - 1, 0)
    except (ValueError, KeyError, TypeError):
        return cut  # not a change of this log: decoding says so


def _foreign_message(offset: int, address: Address) -> LogCorrupt:
    return LogCorrupt(
        f"The message at offset {offset} of {address[0]}-{address[1]} is not a change of this log.",
        "Find the process that writes to the topic, or set log.foreign to skip.",
    )


def _join_parts(records: Sequence[Record], address: Address) -> list[Record]:
    """Reassemble changes that were split into several messages."""
    whole: list[Record] = []
    parts: list[bytes] = []
    for offset, key, value in records:
        if not value.startswith(PART_OPENS):
            whole.append((offset, key, value))
            continue
        try:
            data = json.loads(value)
            number, of = data["millrace_part"]["part"], data["millrace_part"]["of"]
            if number != len(parts) or not 0 < of <= 1 << 20:
                raise ValueError("out of order")
            parts.append(base64.b64decode(data["data"], validate=True))
        except (ValueError, KeyError, TypeError):
            raise _foreign_message(offset, address) from None
        if len(parts) == of:
            whole.append((offset, key, b"".join(parts)))
            parts = []
    return whole

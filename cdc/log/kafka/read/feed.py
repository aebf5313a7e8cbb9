"""Messages of some partitions as they come, decoded in chunks: what was asked for, and what came beyond it.

A chunk is turned into rows while its bytes are still warm: decoded all at once, fifty thousand messages cost twice the
CPU. What came beyond the end of a range stays for the next one, undecoded unless somebody runs ahead.
"""

import base64
import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from cdc.errors import LogCorrupt
from cdc.log.kafka.client import available
from cdc.log.kafka.envelope.decode import Decoded, NotAnEnvelope
from cdc.log.kafka.write.producer import PART_OPENS
from cdc.model import LOG_SCHEMA

log = logging.getLogger(__name__)

_CHUNK = 8_192
"""Messages decoded at once: some megabytes, which a processor's cache still holds."""

Decode = Callable[[Sequence["Record"]], Decoded]
"""Turns records of one partition into rows. Raises NotAnEnvelope."""
Record = tuple[int, bytes, bytes]
"""Offset, key, value."""
Address = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `start` up to, not including, `end` of one partition. `start` None: whatever is kept."""

    topic: str
    partition: int
    start: int | None
    end: int

    @property
    def address(self) -> Address:
        """Where it lies."""
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class RangeRows:
    """The rows of one range, each with its offset and its number within its entry."""

    range: OffsetRange
    rows: pa.Table
    offsets: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]


class RefusedByBroker(Exception):
    """What a broker says of a partition that trying again will not mend."""

    def __init__(self, address: Address, error: KafkaError) -> None:
        super().__init__(address)
        self.address = address
        self.error = error


@dataclass(slots=True)
class _PartitionFeed:
    """One partition: `seen` is the offset up to which everything was delivered, `taken` up to which it was given."""

    address: Address
    seen: int
    taken: int
    records: list[Record] = field(default_factory=list)
    chunks: list[Decoded] = field(default_factory=list)

    def note(self, message: "Message[bytes, bytes]") -> int:
        """Keep one message; returns its bytes. A tombstone is only counted: the delete before it says the same."""
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

    def decode(self, below: int, least: int, how: "_Decoder") -> None:
        """Turn the records below an offset into rows, if they are so many. An error leaves them as they are."""
        cut = bisect_left(self.records, below, key=lambda record: record[0])
        if cut < least or not cut or (cut == len(self.records) and least and _is_piece(self.records[-1])):
            return  # a change may be spread over several messages: its last one closes the chunk
        self.chunks.append(how(self.records[:cut], self.address))
        del self.records[:cut]

    def take(self, item: OffsetRange, how: "_Decoder") -> RangeRows:
        """The rows of a range that was delivered."""
        self.decode(item.end, 0, how)
        found: list[Decoded] = []
        while self.chunks:
            chunk = self.chunks[0]
            cut = int(np.searchsorted(_offsets(chunk), item.end))
            found.append(_slice(chunk, 0, cut))
            if cut < chunk.rows.num_rows:
                self.chunks[0] = _slice(chunk, cut, chunk.rows.num_rows)
                break
            del self.chunks[0]
        self.taken = item.end
        return _joined_part(item, found)


@dataclass(frozen=True, slots=True)
class _Decoder:
    decoded: Decode
    foreign: str

    def __call__(self, records: Sequence[Record], address: Address) -> Decoded:
        if any(map(_is_piece, records)):
            records = _joined(records, address)
        try:
            return _placed(self.decoded(records), records)
        except NotAnEnvelope as error:
            if self.foreign == "stop":
                raise _named(records[error.row][0], address) from None
        records = self._without_foreign(records, address)
        return _placed(self.decoded(records), records)

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
    """Partitions assigned to a consumer from given offsets on. One thread at a time."""

    def __init__(self, consumer: Consumer, starts: Mapping[Address, int], decoded: Decode, foreign: str) -> None:
        self._consumer = consumer
        self._decoder = _Decoder(decoded, foreign)
        self._lanes = {address: _PartitionFeed(address, start, start) for address, start in starts.items()}
        self._weight = 0
        consumer.assign([TopicPartition(*address, start) for address, start in starts.items()])

    def continues(self, starts: Mapping[Address, int | None]) -> bool:
        """Whether reading goes on exactly where the last range of each partition ended."""
        return {address: lane.taken for address, lane in self._lanes.items()} == dict(starts)

    def pump(self, seconds: float) -> bool:
        """Take what has come, or the first that comes within that time; whether a message did. Raises Refused."""
        messages = available(self._consumer, seconds)
        only = next(iter(self._lanes.values())) if len(self._lanes) == 1 else None
        for message in messages:
            lane = only or self._lanes[message.topic() or "", message.partition() or 0]
            self._weight += lane.note(message)
        return any(message.error() is None for message in messages)

    def covers(self, ranges: Sequence[OffsetRange]) -> bool:
        """Whether these ranges were delivered; decodes what came of them."""
        for item in ranges:
            self._lanes[item.address].decode(item.end, _CHUNK, self._decoder)
        return all(self._lanes[item.address].seen >= item.end for item in ranges)

    def decode(self) -> None:
        """Turn into rows what came beyond what was asked for."""
        for lane in self._lanes.values():
            lane.decode(lane.seen, _CHUNK, self._decoder)

    def take(self, item: OffsetRange) -> RangeRows:
        """The rows of a range that was delivered."""
        return self._lanes[item.address].take(item, self._decoder)

    @property
    def ahead(self) -> int:
        """How many offsets were delivered beyond what was taken."""
        return sum(lane.seen - lane.taken for lane in self._lanes.values())

    def weighed(self) -> int:
        """Bytes of values delivered since this was last asked."""
        weight, self._weight = self._weight, 0
        return weight


def _offsets(chunk: Decoded) -> npt.NDArray[np.int64]:
    assert chunk.offsets is not None  # see _placed
    return chunk.offsets


def _placed(found: Decoded, records: Sequence[Record]) -> Decoded:
    if found.offsets is not None:
        return found
    return Decoded(found.rows, found.numbers, np.array([offset for offset, _, _ in records], np.int64))


def _slice(chunk: Decoded, low: int, high: int) -> Decoded:
    return Decoded(chunk.rows.slice(low, high - low), chunk.numbers[low:high], _offsets(chunk)[low:high])


def _joined_part(item: OffsetRange, found: Sequence[Decoded]) -> RangeRows:
    rows = pa.concat_tables([LOG_SCHEMA.empty_table(), *(chunk.rows for chunk in found if chunk.rows.num_rows)])
    none = np.zeros(0, np.int64)
    offsets = np.concatenate([none, *map(_offsets, found)])
    return RangeRows(item, rows, offsets, np.concatenate([none, *(chunk.numbers for chunk in found)]))


def _is_piece(record: Record) -> bool:
    return record[2].startswith(PART_OPENS)


def _named(offset: int, address: Address) -> LogCorrupt:
    return LogCorrupt(
        f"The message at offset {offset} of {address[0]}-{address[1]} is not a change of this log.",
        "Find who writes to the topic; log.foreign: skip leaves such messages out.",
    )


def _joined(records: Sequence[Record], address: Address) -> list[Record]:
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
            raise _named(offset, address) from None
        if len(pieces) == of:
            whole.append((offset, key, b"".join(pieces)))
            pieces = []
    return whole

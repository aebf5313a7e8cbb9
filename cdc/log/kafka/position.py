"""Where the log is: markers in a compacted topic, written in the same Kafka transaction as the rows they speak of.

A marker says up to which LSN the log is complete and at which offset each partition of each topic ends there. So a
reader never asks "what is the newest offset", which several partitions answer at several moments: it reads up to a
marker's offsets, and has whole transactions, all of them, and nothing else. Markers share a key within an hour:
compaction leaves one an hour, and slices of old history are an hour long instead of a transaction.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self

from cdc.errors import LogCorrupt
from cdc.log.kafka.admin import Topic
from cdc.log.kafka.topic_tail import Message
from cdc.model import ZERO_LSN, Lsn
from cdc.ports import Offset

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FORMAT = 1
MARKER_KEY = b"position."
MARK_KEY = b"mark."


@dataclass(frozen=True, slots=True)
class TopicExtent:
    """A topic up to some place: which topic exactly, and the offset after the last row in each partition."""

    id: str
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KafkaPosition:
    """A marker, and also the offset of this log: self-contained, so compaction cannot make it unreadable.

    `marker` is the marker's own offset in its topic (-1: before everything). `newest` is the latest commit time so far.
    """

    marker: int = -1
    end: Lsn = ZERO_LSN
    newest: int = 0
    topics: Mapping[str, TopicExtent] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """As the marker's value; its own offset is not in it, as it is not known yet."""
        topics = {name: {"id": extent.id, "ends": extent.ends} for name, extent in self.topics.items()}
        data = {"format": _FORMAT, "end": self.end, "newest": self.newest, "topics": topics}
        return json.dumps(data, separators=(",", ":")).encode()

    def offset(self) -> Offset:
        """As the outside sees it."""
        return Offset(f"{self.marker}:{self.encoded().decode()}")

    @classmethod
    def decoded(cls, marker: int, value: bytes) -> Self:
        """Read a marker back."""
        try:
            data = json.loads(value)
            if data["format"] != _FORMAT:
                raise ValueError("format")
            topics = {
                str(name): TopicExtent(str(part["id"]), tuple(int(end) for end in part["ends"]))
                for name, part in data["topics"].items()
            }
            return cls(marker, Lsn(int(data["end"])), int(data["newest"]), topics)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LogCorrupt(
                f"The position at offset {marker} of the position topic is not ours.",
                "Nothing else may write to <prefix>.millrace.position.",
            ) from None

    @classmethod
    def of(cls, offset: Offset) -> Self:
        """The place that an offset of ours means; ValueError on another log's."""
        marker, colon, value = offset.partition(":")
        if not colon or not marker.removeprefix("-").isdecimal():
            raise ValueError(f"{offset[:40]!r} is not an offset of a Kafka log.")
        return cls.decoded(int(marker), value.encode())


def marker_key(now: datetime) -> bytes:
    """One key an hour: what compaction keeps."""
    return MARKER_KEY + now.strftime("%Y%m%d%H").encode()


def topics_of(place: KafkaPosition) -> list[Topic]:
    """The topics that a place speaks of, as the cluster is asked about them."""
    return [Topic(name, extent.id, len(extent.ends)) for name, extent in place.topics.items()]


@dataclass(frozen=True, slots=True)
class DurableState:
    """What is durable, as of the last commit that a writer knows of."""

    place: KafkaPosition
    marks: Mapping[str, str]


def recovered(messages: Iterable[Message]) -> DurableState:
    """Position and marks as the messages of the position topic leave them."""
    last: Message | None = None
    marks: dict[str, str] = {}
    for message in messages:
        if message.value is None:
            continue
        if message.key.startswith(MARKER_KEY):
            last = message
        elif message.key.startswith(MARK_KEY):
            marks[message.key.removeprefix(MARK_KEY).decode()] = message.value.decode()
    return DurableState(
        KafkaPosition() if last is None else KafkaPosition.decoded(last.offset, last.value or b""), marks
    )

"""Position markers in a compacted topic, written in the same Kafka transaction as their rows.

A marker has the LSN up to which the log is complete and the offset at which each partition of each topic ends there. A
reader never asks for the newest offset, which each partition would answer at a different moment: it reads up to the
offsets of a marker and so gets whole transactions, all of them. All markers of an hour share a key: compaction leaves
one per hour, so slices of old history span an hour instead of a transaction.
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
    """A topic up to some position: the topic's id, and the offset after the last row in each partition."""

    id: str
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KafkaPosition:
    """The content of a marker; also the offset of this log, and complete by itself, so that compaction cannot break it.

    `marker` is the marker's own offset in its topic (-1: before everything). `newest` is the latest commit time so far.
    """

    marker: int = -1
    end: Lsn = ZERO_LSN
    newest: int = 0
    topics: Mapping[str, TopicExtent] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The marker's value. It does not contain the marker's own offset, which is not known yet."""
        topics = {name: {"id": extent.id, "ends": extent.ends} for name, extent in self.topics.items()}
        data = {"format": _FORMAT, "end": self.end, "newest": self.newest, "topics": topics}
        return json.dumps(data, separators=(",", ":")).encode()

    def offset(self) -> Offset:
        """The position as an offset of this log."""
        return Offset(f"{self.marker}:{self.encoded().decode()}")

    @classmethod
    def decoded(cls, marker: int, value: bytes) -> Self:
        """The inverse of `encoded`."""
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
                f"The message at offset {marker} of the position topic is not a position.",
                "Only the log's writer may write to <prefix>.millrace.position.",
            ) from None

    @classmethod
    def of(cls, offset: Offset) -> Self:
        """The inverse of `offset`. Raises ValueError on an offset of another kind of log."""
        marker, colon, value = offset.partition(":")
        if not colon or not marker.removeprefix("-").isdecimal():
            raise ValueError(f"{offset[:40]!r} is not an offset of a Kafka log.")
        return cls.decoded(int(marker), value.encode())


def marker_key(now: datetime) -> bytes:
    """One key per hour: compaction keeps the last marker of each."""
    return MARKER_KEY + now.strftime("%Y%m%d%H").encode()


def topics_of(position: KafkaPosition) -> list[Topic]:
    """The topics of a position."""
    return [Topic(name, extent.id, len(extent.ends)) for name, extent in position.topics.items()]


@dataclass(frozen=True, slots=True)
class DurableState:
    """The durable position and marks, as of the last commit that the writer knows of."""

    position: KafkaPosition
    marks: Mapping[str, str]


def recover_state(messages: Iterable[Message]) -> DurableState:
    """Position and marks after all messages of the position topic."""
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

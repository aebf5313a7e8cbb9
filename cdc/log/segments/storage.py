"""Where a log's segments are kept: what the segment log needs of its folder or bucket.

`folder/` and `bucket/` implement it. Everything else in this package is the same for both: names and their order, the
content of files, merges, retention, compaction, consumers, reading.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import pyarrow as pa

from cdc.log.segments.segment_names import Chain, Segment
from cdc.ports import Schemas


@dataclass(frozen=True, slots=True)
class LogLocation:
    """Where a log is, as plain data that travels to Spark's processes: a folder, or the URI of a bucket and prefix."""

    root: str
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # credentials

    @property
    def in_bucket(self) -> bool:
        """Whether it is a bucket."""
        return "://" in self.root


class SegmentPart(Protocol):
    """One Parquet file of the log."""

    @property
    def name(self) -> str:
        """For messages."""

    def open(self) -> pa.NativeFile:
        """The bytes, for random access. Raises FileNotFoundError: a merge may have removed them."""


class StoredSegment(Protocol):
    """The content of one published segment."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def size(self) -> int:
        """Bytes. Raises FileNotFoundError."""

    @property
    def place(self) -> str:
        """Where it is, as text for `LogStorage.located` of another process."""

    def parts(self) -> Sequence[SegmentPart]:
        """The Parquet file, or the parts of a large transaction in order."""


@dataclass(frozen=True, slots=True)
class View:
    """The whole log at one time: its segments in order, and the content of each."""

    chain: Chain
    stored: Mapping[Segment, StoredSegment]
    foreign_files: tuple[str, ...]


class SmallFiles(Protocol):
    """Small files that are replaced as a whole. No two processes write the same one at a time."""

    def all(self) -> Mapping[str, bytes]:
        """Every file by name, ordered by name."""

    def read(self, name: str) -> bytes | None:
        """One file; None if there is none."""

    def replace(self, name: str, content: bytes) -> None:
        """Write it, durable on return. Raises LogFull."""

    def remove(self, name: str) -> None:
        """Remove it, if it is there."""


class LogStorage(Protocol):
    """A log as its readers see it. Safe to share between threads."""

    @property
    def location(self) -> LogLocation:
        """Where it is."""

    @property
    def poll_seconds(self) -> float:
        """How often a reader that waits for the next entry looks for it."""

    @property
    def schemas(self) -> Schemas:
        """The schema registry."""

    @property
    def consumers(self) -> SmallFiles:
        """The positions of the consumers."""

    def view(self) -> View:
        """The log now. Raises SequenceGap if a sequence number is missing."""

    def located(self, place: str) -> StoredSegment:
        """What a view of another process had at this place."""


class Parts(Protocol):
    """The parts of one large transaction: invisible until the writer publishes them."""

    def add(self, rows: pa.Table) -> None:
        """Write a part. After LogFull nothing was added, and the call may be repeated."""

    def sync(self) -> None:
        """Make the parts durable. May be repeated."""

    def discard(self) -> None:
        """Remove the parts. A crash has the same effect, at the latest when the next writer starts."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A merged segment while it is written: a file on this machine's disk, which no reader sees."""

    file: IO[bytes]
    path: Path


class WriterStorage(LogStorage, Protocol):
    """A log as its writer sees it. Everything raises LogFenced once another writer has taken over."""

    @property
    def append_interval(self) -> float:
        """See LogWriter."""

    def append(self, segment: Segment, rows: pa.Table, marks: Mapping[str, str]) -> None:
        """Make a segment visible, whole or not at all. After LogFull the call may be repeated."""

    def new_parts(self) -> Parts:
        """Begin a large transaction."""

    def append_parts(self, segment: Segment, parts: Parts) -> None:
        """Make the parts visible as one segment, whole or not at all. After LogFull the call may be repeated."""

    def sync(self) -> None:
        """Make what was appended durable. After LogFull the call may be repeated."""

    def staged(self, name: str) -> AbstractContextManager[StagedFile]:
        """A file for a merged segment; removed at the end, unless it was published."""

    def publish(self, run: Sequence[Segment], segment: Segment, staged: StagedFile) -> None:
        """Make a merged segment visible, durably, in the place of adjacent ones, which still exist."""

    def remove(self, stored: StoredSegment) -> None:
        """Remove a segment that a published one has replaced."""

    def archive(self, segments: Sequence[Segment]) -> None:
        """Move fresh segments among the merged ones, without rewriting them."""

    def clean(self) -> None:
        """Remove what earlier writers left behind: superseded segments, parts and merges that nobody published."""

    def quarantine(self, stored: StoredSegment) -> None:
        """Copy a segment out of the log, for inspection."""

    def close(self) -> None:
        """Let the next writer start."""

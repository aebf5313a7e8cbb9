"""Segment names, which hold everything that a restart needs to know. Pure.

`<from>-<to>-<generation>-<first>-<last>-<end>-<rows>-<newest>[-m][-x].parquet`

Sequence numbers give the total order: snapshot chunks can share an LSN, but sequence numbers never repeat. A merged
segment covers the range `from..to` and supersedes the segments of lower generations in that range, so a crash between
publishing a merge and removing its parts is harmless. `-m`: the segment has marks. `-x`: retention removed its rows;
there is at most one such segment, the first, and it keeps position and marks.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cdc.errors import LogCorrupt
from cdc.model import ZERO_LSN, Lsn, format_lsn

_NAME = re.compile(
    r"(\d{15})-(\d{15})-(\d{4})-([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{16})-(\d{1,18})-(\d{1,18})(-m)?(-x)?\.parquet"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One published file, or folder of part files, as described by its name."""

    start: int
    """Its first sequence number."""
    stop: int
    """Its last sequence number; a fresh segment has exactly one."""
    generation: int
    first: Lsn
    last: Lsn
    end: Lsn
    """The LSN up to which the log is complete after this segment; never decreases along the sequence."""
    rows: int
    newest: int
    """Its newest commit time, microseconds since 1970; 0 if it has no rows."""
    marks: bool = False
    expired: bool = False

    def __str__(self) -> str:
        flags = ("-m" if self.marks else "") + ("-x" if self.expired else "")
        return (
            f"{self.start:015d}-{self.stop:015d}-{self.generation:04d}-{self.first:016x}-{self.last:016x}-"
            f"{self.end:016x}-{self.rows}-{self.newest}{flags}.parquet"
        )

    @property
    def described(self) -> str:
        """For messages."""
        return f"segment {self.start}..{self.stop} (up to {format_lsn(self.end)})"


@lru_cache(maxsize=1 << 14)
def parse(name: str) -> Segment | None:
    """The segment of a name; None for other files, which are never read and which `millrace log show` lists."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    start, stop, generation, first, last, end, rows, newest, marks, expired = match.groups()
    segment = Segment(
        start=int(start),
        stop=int(stop),
        generation=int(generation),
        first=Lsn(int(first, 16)),
        last=Lsn(int(last, 16)),
        end=Lsn(int(end, 16)),
        rows=int(rows),
        newest=int(newest),
        marks=marks is not None,
        expired=expired is not None,
    )
    return segment if 1 <= segment.start <= segment.stop else None


class SequenceGap(LogCorrupt):
    """Sequence numbers are missing between two segments."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The current segments in order without a gap, the expired one before them, and those that merges superseded."""

    kept: tuple[Segment, ...] = ()
    floor: Segment | None = None
    superseded: tuple[Segment, ...] = ()

    @property
    def newest(self) -> Segment | None:
        """The last segment, kept or expired; None in an empty log."""
        return self.kept[-1] if self.kept else self.floor

    @property
    def before(self) -> int:
        """The sequence number before the oldest retained one."""
        return self.kept[0].start - 1 if self.kept else self.head

    @property
    def head(self) -> int:
        """The newest sequence number; 0 in an empty log."""
        return self.newest.stop if self.newest else 0

    @property
    def end(self) -> Lsn:
        """The LSN up to which the log is complete."""
        return self.newest.end if self.newest else ZERO_LSN


def chain(segments: Iterable[Segment]) -> Chain:
    """Put segments in order. Raises SequenceGap if a sequence number is missing, LogCorrupt if two overlap.

    A log always begins with sequence number 1: retention replaces removed segments by one expired segment.
    """
    kept: list[Segment] = []
    superseded: list[Segment] = []
    for segment in sorted(set(segments), key=lambda item: (item.start, -item.generation, -item.stop)):
        reached = kept[-1].stop if kept else 0
        if segment.stop <= reached:
            superseded.append(segment)
        elif segment.start == reached + 1:
            kept.append(segment)
        elif segment.start > reached + 1:
            raise SequenceGap(
                f"The log has a gap: sequence numbers {reached + 1} to {segment.start - 1} are missing.",
                "Restore the missing segment, or take a new snapshot into an empty log folder.",
            )
        else:
            raise LogCorrupt(
                f"{segment.described} overlaps {kept[-1].described}.",
                "One of the two files was copied into the log folder; move the copied one away.",
            )
    floor = kept.pop(0) if kept and kept[0].expired else None
    return Chain(tuple(kept), floor, tuple(superseded))


def after(kept: Sequence[Segment], sequence: int) -> Sequence[Segment]:
    """The segments that have entries after a sequence number."""
    low, high = 0, len(kept)
    while low < high:
        middle = (low + high) // 2
        if kept[middle].stop <= sequence:
            low = middle + 1
        else:
            high = middle
    return kept[low:]

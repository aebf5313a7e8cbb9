"""Segment names: everything a restart must know, and nothing else is read. Pure.

`<from>-<to>-<generation>-<first>-<last>-<end>-<rows>-<newest>[-m][-x].parquet`

Sequence numbers give the total order; snapshot chunks share LSNs, sequences never repeat. A merged segment covers the
range `from..to`; a segment inside the range of one with a higher generation is superseded by it, so that a crash
between publishing a merge and removing its parts is harmless. `-m`: it carries marks. `-x`: its rows were removed by
retention; there is at most one, at the beginning, and it keeps position and marks.
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
    """One published file, or folder of part files, as its name describes it."""

    start: int
    """First sequence number in it."""
    stop: int
    """Last sequence number in it; hot segments hold exactly one."""
    generation: int
    first: Lsn
    last: Lsn
    end: Lsn
    """What a reader has reached after it; never goes back along the sequence."""
    rows: int
    newest: int
    """Newest commit time in it, microseconds since 1970; 0 if it has no rows."""
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
    """None for a file that is not ours: it is never read, and `millrace log show` lists it."""
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


class Hole(LogCorrupt):
    """Sequence numbers are missing between two segments."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The segments that count, in order and without a hole; what retention removed before; what merges superseded."""

    kept: tuple[Segment, ...] = ()
    floor: Segment | None = None
    superseded: tuple[Segment, ...] = ()

    @property
    def newest(self) -> Segment | None:
        """The last one, kept or expired; None in an empty log."""
        return self.kept[-1] if self.kept else self.floor

    @property
    def before(self) -> int:
        """The sequence number before the oldest one kept."""
        return self.kept[0].start - 1 if self.kept else self.head

    @property
    def head(self) -> int:
        """The newest sequence number; 0 in an empty log."""
        return self.newest.stop if self.newest else 0

    @property
    def end(self) -> Lsn:
        """The LSN that the newest segment brings a reader to."""
        return self.newest.end if self.newest else ZERO_LSN


def chain(segments: Iterable[Segment]) -> Chain:
    """Put segments in order; raises Hole if a sequence number is missing, LogCorrupt if two overlap.

    A log begins with sequence number 1 for ever: what retention removes leaves an expired segment in its place.
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
            raise Hole(
                f"The log has a hole: sequence {reached + 1} to {segment.start - 1} is missing.",
                "Restore the missing segment, or take a new snapshot into an empty log folder.",
            )
        else:
            raise LogCorrupt(
                f"{segment.described} overlaps {kept[-1].described}.",
                "One of the two files was copied into the log folder; move the foreign one away.",
            )
    floor = kept.pop(0) if kept and kept[0].expired else None
    return Chain(tuple(kept), floor, tuple(superseded))


def after(kept: Sequence[Segment], sequence: int) -> Sequence[Segment]:
    """The segments that hold anything beyond a sequence number."""
    low, high = 0, len(kept)
    while low < high:
        middle = (low + high) // 2
        if kept[middle].stop <= sequence:
            low = middle + 1
        else:
            high = middle
    return kept[low:]

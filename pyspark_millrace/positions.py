"""Where a read begins and ends: what a user names, as an offset of the log and a range of commits.

An offset of the log may be some transactions early (`LogReader.seek`); the range cuts exactly. It is half open: reads
of adjacent ranges give each change once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import ChangesRemoved, ConfigError
from cdc.model import Lsn, format_lsn
from cdc.ports import LogReader, Offset
from pyspark_millrace.options import Edge, Point

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LARGEST = (1 << 63) - 1
_FROM_LSN, _FROM_TIME = "from_lsn", "from_time"


@dataclass(frozen=True, slots=True)
class CommitRange:
    """Commits from an LSN and a time on, up to, not including, an LSN. Times are microseconds since 1970."""

    from_lsn: int = 0
    from_time: int = 0
    until_lsn: int = _LARGEST

    def rows_of(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """The changes whose commits are in the range."""
        if self == CommitRange():
            return changes
        lsns = changes.column("commit_lsn").to_numpy()
        times = changes.column("commit_ts").cast(pa.int64()).to_numpy()
        inside = (lsns >= self.from_lsn) & (lsns < self.until_lsn) & (times >= self.from_time)
        return changes if inside.all() else changes.filter(pa.array(inside))

    def encoded(self) -> dict[str, int]:
        """Its begin, for an offset in a checkpoint: a query that starts again must not take it from changed options."""
        found = {_FROM_LSN: self.from_lsn, _FROM_TIME: self.from_time}
        return {name: value for name, value in found.items() if value}

    @classmethod
    def decoded(cls, offset: Mapping[str, object]) -> Self:
        """The inverse of `encoded`."""
        return cls(int(str(offset.get(_FROM_LSN, 0))), int(str(offset.get(_FROM_TIME, 0))))


def begin(reader: LogReader, point: Point) -> tuple[Offset, CommitRange]:
    """Where to begin. Raises ChangesRemoved if retention removed changes between that point and what is kept."""
    if point is Edge.START:
        return reader.start(), CommitRange()
    if point is Edge.NOW:
        return reader.head()[0], CommitRange()
    if isinstance(point, datetime):
        return _begin_at_time(reader, point)
    if point < (removed := reader.removed()):
        raise _removed(f"Option 'from' is {format_lsn(Lsn(int(point)))}", removed)
    return reader.seek(Lsn(int(point))), CommitRange(from_lsn=int(point))


def _begin_at_time(reader: LogReader, moment: datetime) -> tuple[Offset, CommitRange]:
    offset = reader.seek(moment)
    if (removed := reader.removed()) and offset == reader.start():
        raise _removed(
            f"Option 'from' is {moment.isoformat()}, which may be before the oldest change of the log", removed
        )
    first = _first_commit(reader, offset, moment)
    return offset, CommitRange(from_time=_micros(moment)) if first is None else CommitRange(from_lsn=first)


def _removed(what: str, removed: Lsn) -> ChangesRemoved:
    return ChangesRemoved(
        f"{what}, and retention removed the changes up to {format_lsn(removed)}.",
        "Give a later one, or from = start, which begins at the oldest change that is left.",
    )


def until(reader: LogReader, point: Point, commits: CommitRange) -> CommitRange:
    """The range with its end; without one if the log does not reach that far yet."""
    if isinstance(point, Edge):
        return commits
    end = _first_commit(reader, reader.seek(point), point) if isinstance(point, datetime) else int(point)
    if end is None:
        return commits
    if end < commits.from_lsn:
        raise ConfigError("Option 'until' is before option 'from'.", "Swap them: from <= commit < until is read.")
    return CommitRange(commits.from_lsn, commits.from_time, end)


def _first_commit(reader: LogReader, offset: Offset, moment: datetime) -> int | None:
    """The LSN of the first commit in log order at or after a time. Commit times alone do not follow log order."""
    for piece in reader.read(offset):
        late = pc.greater_equal(piece.rows["commit_ts"], pa.scalar(moment, pa.timestamp("us", tz="UTC")))
        found = np.flatnonzero(late.to_numpy())
        if len(found):
            return int(piece.rows["commit_lsn"][int(found[0])].as_py())
    return None


def _micros(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)

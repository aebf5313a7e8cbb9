"""The changes of a query's micro-batches, folded: few are read in the driver's process, many by Spark's tasks.

A job of Spark with its plan and its Python processes takes 60 ms of CPU, however few rows it has: more than reading and
folding a thousand changes here, and most of the latency of a pipeline that keeps up. Even a micro-batch without a job
costs Spark more time than its rows cost us, so a batch is followed here by what comes after it
(docs/adr/0029-small-batches.md).
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import LogCorrupt
from cdc.model import PROGRESS_TABLE, ZERO_LSN, Lsn
from cdc.ports import LogReader, Offset, Slice
from sinks.fold.arrow import ranked
from sinks.fold.folded import Folded, gather, of_slices
from sinks.fold.spark import fold

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FEW_BYTES = 4 << 20
"""Bytes of WAL up to which a batch is read here: some ten thousand changes."""
_SMALL_BYTES = 16 << 20
"""Bytes in memory up to which it is: the rows of a snapshot or a chunk are many, and need no WAL."""
_PIECE_BYTES = 32 << 20
"""Bytes of a folded batch in the driver at once. Three sinks have a piece each, in Arrow and in the JVM: 200 MB each
were too much for a driver of 1 GB."""
_FOLLOW_SECONDS, _FOLLOW_CHANGES = 10.0, 20_000
"""How long, and how many changes, one batch is followed. Spark then plans these changes as a batch of its own, which is
skipped: one round in ten seconds delays one change in a hundred."""


class BatchReader:
    """Reads the micro-batches of one query, in order."""

    def __init__(self, log: LogReader, checkpoint: Path) -> None:
        self._log = log
        self._offsets = checkpoint / "offsets"
        self._after: Offset | None = None
        self._reached = ZERO_LSN
        """Where the last batch ended, with what followed it. Until the first has, the distance to the end of the log is
        not known."""
        self._size = 0
        """Bytes of the last batch that tasks read, folded."""

    def read(self, changes: "DataFrame", number: int) -> Iterator[Folded]:
        """The micro-batch with this number, in one piece or, if it is large, several of whole keys.

        Every piece has the truncates and the removed ranges; only the last one has the position that the batch reaches.
        None if `follow` has read it already.
        """
        until = self._offset(number)
        few = self._few(until, self._log.head()[1])
        self._size = 0
        if few and few[-1].offset == until:
            yield self._followed(few)
        elif not self._passed(until):
            for folded in _collected(changes, self._log):
                self._size += sum(batch.rows.nbytes for batch in folded.batches)
                yield folded
                self._reached = max(self._reached, folded.reached)
            self._after = until

    def follow(self, ended: Callable[[], bool]) -> Iterator[Folded]:
        """What the log gets after the batch, until that is much, or for some seconds.

        The trap: Spark's checkpoint does not know it. So only a query that does not start at its checkpoint may follow.
        """
        deadline, changes = time.monotonic() + _FOLLOW_SECONDS, 0
        while changes < _FOLLOW_CHANGES and time.monotonic() < deadline and not ended():
            few = self._few(*self._log.head())
            if few is None:
                return
            if few:
                changes += sum(piece.rows.num_rows for piece in few)
                yield self._followed(few)
            else:
                time.sleep(self._log.poll_seconds)

    def _few(self, until: Offset | None, end: Lsn) -> Sequence[Slice] | None:
        """The changes after the last batch, if they are few: then the job behind a DataFrame need not run. `end` is
        where the log ends."""
        if self._after is None or until is None or self._size > _SMALL_BYTES:
            return None
        if end - self._reached > _FEW_BYTES:
            return None
        if until == self._after:  # a look at the log may cost a request
            return []
        found: list[Slice] = []
        size = 0
        for piece in self._log.read(self._after, until):
            found.append(piece)
            size += piece.rows.nbytes
            if size > _SMALL_BYTES:
                return None
        return found

    def _passed(self, until: Offset | None) -> bool:
        """Whether `follow` has read so far. Offsets have no order of their own: something must lie between both."""
        if self._after is None or until is None:
            return False
        return until == self._after or next(iter(self._log.read(until, self._after)), None) is not None

    def _followed(self, slices: Sequence[Slice]) -> Folded:
        self._after, self._reached = slices[-1].offset, max(self._reached, slices[-1].end)
        return of_slices(slices, self._log.schemas)

    def _offset(self, number: int) -> Offset | None:
        """Where a micro-batch ends: Spark writes it to the checkpoint before the batch begins. One line per source,
        after a version and a line of its own."""
        with suppress(OSError, ValueError, IndexError):
            found: dict[str, Any] = json.loads((self._offsets / str(number)).read_text(encoding="utf-8").split("\n")[2])
            return Offset(str(next(iter(found.values()))))
        return None


def _collected(changes: "DataFrame", log: LogReader) -> Iterator[Folded]:
    """Fold a micro-batch that tasks read: by Arrow in the driver if its packed rows have at most 64 MB, else by Spark
    SQL."""
    from pyspark import StorageLevel

    rows = log.unpacked(changes)
    if isinstance(rows, pa.Table) and not rows.num_rows:
        return  # a query that starts at the end of the log begins with an empty batch
    if isinstance(rows, pa.Table):
        yield gather(ranked(rows), log.schemas)
        return
    whole = fold(rows)
    rows = _piece(whole, 0)
    last = _size(rows) // _PIECE_BYTES
    if last == 0:
        yield gather(rows, log.schemas)
        return
    whole.persist(StorageLevel.DISK_ONLY)  # the log is read once more, not once per piece
    try:
        for piece in range(last + 1):
            folded = gather(rows if piece == 0 else _piece(whole, piece), log.schemas)
            yield folded if piece == last else replace(folded, reached=ZERO_LSN, offset=None)
    finally:
        whole.unpersist()


def _piece(whole: "DataFrame", piece: int) -> "pa.Table":
    low, high = piece * _PIECE_BYTES, (piece + 1) * _PIECE_BYTES
    return whole.where(f"(bytes >= {low} and bytes < {high}) or op in ('t', 'm', 'p')").toArrow()


def _size(rows: "pa.Table") -> int:
    """Bytes of the whole batch, from its progress marker."""
    sizes = rows.filter(pc.equal(rows.column("table"), pa.scalar(PROGRESS_TABLE))).column("bytes").to_pylist()
    if not sizes:
        raise LogCorrupt("A batch of the log has no progress marker.", "Its end is unknown: report this.")
    return max(size or 0 for size in sizes)

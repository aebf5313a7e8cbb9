"""What one task reads of the segment log: plain data that travels to the worker, and how it is read there. No Spark."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from cdc.errors import LogCorrupt
from cdc.log.segments import segment_file
from cdc.log.segments.folder import View
from cdc.log.segments.reader import SegmentReader, cuts_of, offset_of, require_kept
from cdc.log.segments.segment_names import Segment, after, parse
from cdc.model import LOG_SCHEMA, PROGRESS_TABLE, Op
from cdc.ports import Offset


@dataclass(frozen=True, slots=True)
class Split:
    """Rows `low` to `high` of the entries after one sequence number, up to another.

    `place` is where they were when the batch was planned, from row `base` on: a merge may have moved them since.
    """

    after: int
    until: int
    low: int
    high: int
    place: str
    base: int

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.high - self.low


def advance(view: View, start: int, rows: int, size: int) -> int:
    """How far a batch may go from `start`: whole entries, about so many rows or bytes on disk, at least one entry."""
    reached = start
    for segment in after(view.chain.kept, start):
        weight = _size(view.places[segment]) / max(segment.rows, 1)
        for cut in cuts_of(view, segment):
            if cut.sequence <= start:
                continue
            rows -= cut.rows
            size -= int(cut.rows * weight)
            if (rows < 0 or size < 0) and reached > start:
                return reached
            reached = cut.sequence
    return reached


def _size(place: Path) -> int:
    return sum(path.stat().st_size for path in segment_file.paths(place))


def pieces(view: View, start: int, end: int) -> list[Split]:
    """The rows between two offsets, file by file, in order."""
    require_kept(view, start)
    found = []
    for segment in after(view.chain.kept, start):
        if segment.start > end:
            break
        found.append(_piece(view, segment, start, end))
    return [piece for piece in found if piece.rows]


def _piece(view: View, segment: Segment, start: int, end: int) -> Split:
    place = str(view.places[segment])
    if segment.start > start and segment.stop <= end:
        return Split(segment.start - 1, segment.stop, 0, segment.rows, place, 0)
    cuts = cuts_of(view, segment)
    base = sum(cut.rows for cut in cuts if cut.sequence <= start)
    rows = sum(cut.rows for cut in cuts if start < cut.sequence <= end)
    return Split(max(start, segment.start - 1), min(end, segment.stop), 0, rows, place, base)


def spread(whole: Sequence[Split], tasks: int, least: int) -> list[list[Split]]:
    """Cut pieces into at most `tasks` shares of at least `least` rows: a task costs more than reading a few rows."""
    total = sum(piece.rows for piece in whole)
    share = max(-(-total // tasks), least)
    shares: list[list[Split]] = [[]]
    left = share
    for piece in whole:
        low = piece.low
        while low < piece.high:
            if left == 0:
                shares.append([])
                left = share
            high = min(low + left, piece.high)
            shares[-1].append(Split(piece.after, piece.until, low, high, piece.place, piece.base))
            left -= high - low
            low = high
    return shares


def read(root: Path, piece: Split) -> Iterator[pa.Table]:
    """The rows of a piece, wherever they lie by now."""
    done = 0
    try:
        for table in _planned(piece):
            yield table
            done += table.num_rows
    except FileNotFoundError:
        yield from _searched(root, piece, piece.low + done)


def _planned(piece: Split) -> Iterator[pa.Table]:
    place = Path(piece.place)
    segment = parse(place.name)
    if segment is None:
        raise segment_file.corrupt(place, "is not a segment")
    return segment_file.batches(place, segment, piece.base + piece.low, piece.base + piece.high)


def _searched(root: Path, piece: Split, low: int) -> Iterator[pa.Table]:
    seen = 0
    for part in SegmentReader(root).read(offset_of(piece.after), offset_of(piece.until)):
        first, last = max(low - seen, 0), min(piece.high - seen, part.rows.num_rows)
        seen += part.rows.num_rows
        if first < last:
            yield part.rows.slice(first, last - first)


def reached(view: View, end: int) -> tuple[int, int, int, Offset]:
    """What the marker of a batch that ends at a sequence number says: end LSN, last commit LSN, newest time, offset."""
    segment = next(iter(after(view.chain.kept, end - 1)), None)
    if segment is None:
        raise LogCorrupt(f"Offset {end} is beyond the end of the log ({view.chain.head}).", "Remove the checkpoint.")
    cut = next(cut for cut in cuts_of(view, segment) if cut.sequence >= end)
    return cut.end, min(segment.last, cut.end), cut.newest, offset_of(end)


def progress_row(end: int, commit_lsn: int, newest: int, offset: Offset) -> pa.Table:
    """A PROGRESS_TABLE row: complete up to `end`, and, where entries share an LSN, up to the offset in `after`."""
    values = {
        "table": PROGRESS_TABLE,
        "op": Op.MESSAGE.value,
        "version": end,
        "commit_lsn": commit_lsn,
        "ordinal": 0,
        "xid": 0,
        "after": offset,
        "commit_ts": newest,
        "schema_id": 0,
    }
    columns = [pa.array([values.get(field.name)], field.type) for field in LOG_SCHEMA]
    return pa.Table.from_arrays(columns, schema=LOG_SCHEMA)

"""Splits of the segment log: the plain data that tells a worker what to read, and how it reads it. Without Spark."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from cdc.errors import LogCorrupt, LogLost
from cdc.log.bucket_layout import in_buckets
from cdc.log.segments import segment_file
from cdc.log.segments.reader import SegmentReader, cuts_of, offset_of, require_kept
from cdc.log.segments.segment_names import Segment, after, parse
from cdc.log.segments.storage import View
from cdc.model import LOG_SCHEMA, PROGRESS_TABLE, Op
from cdc.ports import Offset, Share

_VISIBLE_SECONDS = 10.0
"""How long a file of the log may take to become visible on another machine of a shared file system."""


@dataclass(frozen=True, slots=True)
class Split:
    """Rows `low` to `high` of the entries between two sequence numbers.

    `segment` and `place` are the name and place of the segment that had them when the batch was planned, from row
    `base` on: a merge may have moved them since.
    """

    after: int
    until: int
    low: int
    high: int
    segment: str
    place: str
    base: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.high - self.low


def advance(view: View, start: int, rows: int, size: int) -> int:
    """The end of a batch that begins at `start`: whole entries, about so many rows or bytes on disk, at least one."""
    reached = start
    for segment in after(view.chain.kept, start):
        weight = view.stored[segment].size / max(segment.rows, 1)
        for cut in cuts_of(view, segment):
            if cut.sequence <= start:
                continue
            rows -= cut.rows
            size -= int(cut.rows * weight)
            if (rows < 0 or size < 0) and reached > start:
                return reached
            reached = cut.sequence
    return reached


def plan(view: View, start: int, end: int) -> list[Split]:
    """One split per file for the rows between two offsets, in order."""
    require_kept(view, start)
    found = []
    for segment in after(view.chain.kept, start):
        if segment.start > end:
            break
        found.append(_split_of(view, segment, start, end))
    return [split for split in found if split.rows]


def _split_of(view: View, segment: Segment, start: int, end: int) -> Split:
    name, place = str(segment), view.stored[segment].place
    if segment.start > start and segment.stop <= end:
        return Split(segment.start - 1, segment.stop, 0, segment.rows, name, place, 0)
    cuts = cuts_of(view, segment)
    base = sum(cut.rows for cut in cuts if cut.sequence <= start)
    rows = sum(cut.rows for cut in cuts if start < cut.sequence <= end)
    return Split(max(start, segment.start - 1), min(end, segment.stop), 0, rows, name, place, base)


def distribute(whole: Sequence[Split], tasks: int, least: int) -> list[list[Split]]:
    """Distribute splits over at most `tasks` shares of at least `least` rows: a task costs more than a few rows."""
    total = sum(split.rows for split in whole)
    share = max(-(-total // tasks), least)
    shares: list[list[Split]] = [[]]
    left = share
    for split in whole:
        low = split.low
        while low < split.high:
            if left == 0:
                shares.append([])
                left = share
            high = min(low + left, split.high)
            shares[-1].append(replace(split, low=low, high=high))
            left -= high - low
            low = high
    return shares


def read(reader: SegmentReader, split: Split) -> Iterator[pa.Table]:
    """The rows of a split, also if a merge has moved them."""
    done = 0
    try:
        for table in _read_planned(reader, split):
            yield table
            done += table.num_rows
    except FileNotFoundError:
        yield from _read_moved(reader, split, split.low + done)


def _read_planned(reader: SegmentReader, split: Split, buckets: range = segment_file.ALL_BUCKETS) -> Iterator[pa.Table]:
    segment = parse(split.segment)
    if segment is None:
        raise segment_file.corrupt(split.segment, "is not a segment")
    stored = reader.storage.located(split.place)
    return segment_file.batches(stored, segment, split.base + split.low, split.base + split.high, buckets)


def _read_moved(reader: SegmentReader, split: Split, low: int) -> Iterator[pa.Table]:
    seen = 0
    for part in reader.read(offset_of(split.after), offset_of(split.until)):
        first, last = max(low - seen, 0), min(split.high - seen, part.rows.num_rows)
        seen += part.rows.num_rows
        if first < last:
            yield part.rows.slice(first, last - first)


def share_of(after: int, until: int, low: int, high: int) -> Share:
    """The changes between two sequence numbers whose keys are in the buckets `low` up to, not including, `high`."""
    return Share(json.dumps([after, until, low, high]))


def read_share(reader: SegmentReader, share: Share) -> Iterator[pa.Table]:
    """The changes of a share, a row group at a time."""
    start, until, low, high = json.loads(share)
    for split in plan(_view_up_to(reader, until), start, until):
        try:
            yield from _read_planned(reader, split, range(low, high))
        except FileNotFoundError:
            # A merge has moved the rows. Those that were read before come again: a fold counts a change once.
            yield from (in_buckets(rows, range(low, high)) for rows in _read_moved(reader, split, split.low))


def _view_up_to(reader: SegmentReader, until: int) -> View:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while (view := reader.view()).chain.head < until:
        if time.monotonic() > deadline:
            raise LogLost(
                f"The log ends at offset {view.chain.head} here, but the driver has seen {until}.",
                f"Every machine of the cluster must see the same log under {reader.storage.location.root}.",
            )
        time.sleep(reader.poll_seconds)
    return view


def progress_at(view: View, end: int) -> tuple[int, int, int, Offset]:
    """The arguments of `progress_row` for a batch that ends at this sequence number."""
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

"""Merging: many small segments become one, so that listing and reading stay cheap for ever.

Every step publishes the new segment first and takes the old ones away afterwards; in between the higher generation
counts, so a crash at any moment leaves nothing to repair but files that the next round removes.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from cdc import failpoint
from cdc.durable_files import open_new, remove, room, sync_folder
from cdc.log.segments import segment_file
from cdc.log.segments.folder import LogFolder, View
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.writer_lock import WriterLock
from cdc.model import LOG_SCHEMA, Lsn

FAN_IN = 16
"""Merged segments of one generation that make one of the next: each row is rewritten once per factor of sixteen."""
_GROUP_BYTES = 16 << 20
"""Of rows in a row group. Merging holds one beside its pages: with 64 MB that was the peak of the whole process."""
_LEVEL = 1
"""zstd level of history: level 3 costs 40 % more CPU and saves nothing on JSON images."""


def recover_marks(view: View, until: int | None = None) -> dict[str, str]:
    """Every mark up to a sequence number, newest wins.

    A merged segment repeats all marks before it, so the search ends at the first merged one.
    """
    marks: dict[str, str] = {}
    floor = () if view.chain.floor is None else (view.chain.floor,)
    for segment in reversed((*floor, *view.chain.kept)):
        if not segment.marks or (until is not None and segment.start > until):
            continue
        marks = {**segment_file.facts(view.places[segment], segment).marks, **marks}
        if segment.generation:
            break
    return marks


def plan(kept: Sequence[Segment], sizes: Mapping[Segment, int], hot: int, target: int) -> Iterator[tuple[Segment, ...]]:
    """Which neighbours to merge, oldest first. Pure.

    Fresh segments: once there are more than `hot`, all but half of that. Merged ones: sixteen of a generation, or as
    many as make the target size. Larger ones stay as they are.
    """
    fresh = [segment for segment in kept if segment.generation == 0 and sizes[segment] < target // 4]
    due = frozenset(fresh[: len(fresh) - hot // 2] if len(fresh) > hot else ())
    run: list[Segment] = []
    weight = 0
    for segment in kept:
        same = bool(run) and segment.generation == run[-1].generation
        fits = weight + sizes[segment] <= target and (segment.generation == 0 or len(run) < FAN_IN)
        candidate = segment in due or (segment.generation > 0 and sizes[segment] < target)
        if run and not (candidate and same and fits):
            if _worth(run, full=candidate and same):
                yield tuple(run)
            run, weight = [], 0
        if candidate:
            run.append(segment)
            weight += sizes[segment]
    if run and _worth(run, full=False):
        yield tuple(run)


def _worth(run: Sequence[Segment], full: bool) -> bool:
    return run[0].generation == 0 or len(run) >= FAN_IN or (full and len(run) > 1)


class SegmentMerger:
    """Rewrites published segments; used by the one writer, from one thread at a time."""

    def __init__(self, folder: LogFolder, lease: WriterLock) -> None:
        self._folder = folder
        self._lease = lease

    def view(self) -> View:
        """The segments as they lie now."""
        return self._folder.view()

    def tidy(self) -> None:
        """Remove what a crash left behind: segments that a published merge has superseded."""
        self._lease.require()
        view = self.view()
        if view.chain.superseded:
            self._sync()  # what superseded them may be visible and not yet durable
        for segment in view.chain.superseded:
            self._lease.withdraw(view.places[segment])

    def merge(self, hot: int, target: int, until: int | None = None) -> int:
        """Merge what is due, at most up to a sequence number; returns how many segments went into new ones."""
        view = self.view()
        sizes = sizes_of(view)
        kept = [segment for segment in view.chain.kept if until is None or segment.stop <= until]
        merged = 0
        for run in plan(kept, sizes, hot, target):
            self._merge(self.view(), run)  # seen anew: marks may lie in what the last merge took away
            merged += len(run)
        self._move_large(view, sizes, hot, target)
        return merged

    def _move_large(self, view: View, sizes: Mapping[Segment, int], hot: int, target: int) -> None:
        """Fresh segments that are large already only change folders."""
        large = [segment for segment in view.chain.kept if segment.generation == 0 and sizes[segment] >= target // 4]
        for segment in large:
            place = view.places[segment]
            if place.parent == self._folder.hot and segment.stop <= view.chain.head - hot:
                self._lease.rename(place, self._folder.history / place.name)
                self._sync()

    def _merge(self, view: View, run: Sequence[Segment]) -> None:
        cuts = [cut for segment in run for cut in _cuts(view, segment)]
        rows = (batch for segment in run for batch in _batches(view, segment))
        self.replace(view, run, rows, cuts)

    def replace(
        self,
        view: View,
        run: Sequence[Segment],
        rows: Iterable[pa.Table],
        cuts: Sequence[segment_file.Cut],
        *,
        expired: bool = False,
        marks: Mapping[str, str] | None = None,
    ) -> Segment:
        """Publish one segment in the place of neighbours, then take them away. `marks`: those of all up to there."""
        marks = recover_marks(view, run[-1].stop) if marks is None else marks
        aside = self._lease.aside / f"merge-{run[0].start}-{run[-1].stop}.parquet"
        try:
            extent = self._write(aside, rows, segment_file.Facts(marks, cuts))
            segment = _successor(run, extent, bool(marks), expired)
            failpoint.reached("log.merge_before_publish")
            self._lease.rename(aside, self._folder.history / str(segment))
        except BaseException:
            remove(aside)  # the next round writes a file of that name
            raise
        self._sync()
        failpoint.reached("log.merge_after_publish")
        for old in run:
            self._lease.withdraw(view.places[old])
            failpoint.reached("log.merge_removing")
        return segment

    def _write(self, aside: Path, rows: Iterable[pa.Table], facts: segment_file.Facts) -> segment_file.Extent:
        extent = segment_file.Extent()
        with room(self._lease.aside), os.fdopen(open_new(aside), "wb") as file:
            with segment_file.writer(file, "zstd", _LEVEL) as parquet:
                for group in _grouped(rows):
                    extent = extent.with_more(segment_file.Extent.of(group))
                    parquet.write_table(group, row_group_size=segment_file.GROUP_ROWS)
                parquet.add_key_value_metadata(facts.encoded())
            file.flush()
            os.fsync(file.fileno())
        return extent

    def _sync(self) -> None:
        """Make the names in history durable. What they supersede goes only afterwards, at once or in a later round."""
        with room(self._folder.history):
            sync_folder(self._folder.history)


def sizes_of(view: View) -> dict[Segment, int]:
    """Bytes on disk of every segment that counts."""
    floor = () if view.chain.floor is None else (view.chain.floor,)
    return {
        segment: sum(path.stat().st_size for path in segment_file.paths(view.places[segment]))
        for segment in (*floor, *view.chain.kept)
    }


def _successor(run: Sequence[Segment], extent: segment_file.Extent, marks: bool, expired: bool) -> Segment:
    end = run[-1].end
    first, last = (extent.first, extent.last) if extent.rows else (run[0].first, run[-1].last)
    generation = max(segment.generation for segment in run)
    # What expires again and again must not climb for ever: a longer range of the same generation counts as newer too.
    if not expired or len(run) == 1 or generation == 0:
        generation += 1
    return Segment(
        run[0].start, run[-1].stop, generation, Lsn(first), Lsn(last), end, extent.rows, extent.newest, marks, expired
    )


def _cuts(view: View, segment: Segment) -> Sequence[segment_file.Cut]:
    if segment.start == segment.stop:
        return (segment_file.Cut(segment.stop, segment.end, segment.rows, segment.newest),)
    return segment_file.facts(view.places[segment], segment).cuts


def _batches(view: View, segment: Segment) -> Iterator[pa.Table]:
    return segment_file.batches(view.places[segment], segment, 0, segment.rows)


def _grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Row groups large enough to be worth reading alone, small enough to hold."""
    held: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        held.append(table)
        rows += table.num_rows
        size += table.nbytes
        if rows >= segment_file.GROUP_ROWS or size >= _GROUP_BYTES:
            yield pa.concat_tables(held)
            held, rows, size = [], 0, 0
    yield pa.concat_tables(held) if held else LOG_SCHEMA.empty_table()

"""Merges many small segments into one, so that the number of files stays small.

Every merge publishes the new segment before it removes the old ones. Until then readers use the one with the higher
generation, so a crash at any moment leaves at most superseded files, which the next round removes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from cdc import failpoint
from cdc.log.segments import segment_file
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.storage import StagedFile, View, WriterStorage
from cdc.model import LOG_SCHEMA, Lsn

FAN_IN = 16
"""Merged segments of one generation that become one of the next: a row is rewritten once per factor of sixteen."""
_GROUP_BYTES = 16 << 20
"""Bytes of rows in a row group. A merge keeps one group and its pages in memory: with 64 MB that set the peak memory
of the whole process."""
_LEVEL = 1
"""zstd level of merged segments: level 3 costs 40 % more CPU and saves no space on JSON images."""


def recover_marks(view: View, until: int | None = None) -> dict[str, str]:
    """The newest value of every mark up to a sequence number.

    A merged segment repeats all earlier marks, so the search stops at the newest merged segment that has marks.
    """
    marks: dict[str, str] = {}
    floor = () if view.chain.floor is None else (view.chain.floor,)
    for segment in reversed((*floor, *view.chain.kept)):
        if not segment.marks or (until is not None and segment.start > until):
            continue
        marks = {**segment_file.metadata(view.stored[segment], segment).marks, **marks}
        if segment.generation:
            break
    return marks


def plan(kept: Sequence[Segment], sizes: Mapping[Segment, int], hot: int, target: int) -> Iterator[tuple[Segment, ...]]:
    """Which adjacent segments to merge, oldest first. Pure.

    Fresh segments: once there are more than `hot`, all but the newest `hot / 2`. Merged segments: sixteen of one
    generation, or as many as reach the target size. Larger segments are not merged.
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
            if _worth_merging(run, full=candidate and same):
                yield tuple(run)
            run, weight = [], 0
        if candidate:
            run.append(segment)
            weight += sizes[segment]
    if run and _worth_merging(run, full=False):
        yield tuple(run)


def _worth_merging(run: Sequence[Segment], full: bool) -> bool:
    return run[0].generation == 0 or len(run) >= FAN_IN or (full and len(run) > 1)


class SegmentMerger:
    """Rewrites published segments. Only the log's writer uses it, from one thread at a time."""

    def __init__(self, storage: WriterStorage, by_bucket: bool = False) -> None:
        self._storage = storage
        self._by_bucket = by_bucket

    def view(self) -> View:
        """The segments now."""
        return self._storage.view()

    def merge(self, hot: int, target: int, until: int | None = None) -> int:
        """Merge the segments that are due, at most up to a sequence number; returns how many were merged."""
        view = self.view()
        sizes = sizes_of(view)
        kept = [segment for segment in view.chain.kept if until is None or segment.stop <= until]
        merged = 0
        for run in plan(kept, sizes, hot, target):
            self._merge(self.view(), run)  # a new listing: the last merge may have removed files that hold marks
            merged += len(run)
        self._archive_large(view, sizes, hot, target)
        return merged

    def _archive_large(self, view: View, sizes: Mapping[Segment, int], hot: int, target: int) -> None:
        """Move large fresh segments to history without rewriting them."""
        large = [segment for segment in view.chain.kept if segment.generation == 0 and sizes[segment] >= target // 4]
        self._storage.archive([segment for segment in large if segment.stop <= view.chain.head - hot])

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
        """Publish one segment that replaces adjacent ones, then remove those. `marks`: all marks up to its end."""
        marks = recover_marks(view, run[-1].stop) if marks is None else marks
        with self._storage.staged(f"merge-{run[0].start}-{run[-1].stop}.parquet") as staged:
            extent = self._write(staged, rows, segment_file.Metadata(marks, cuts))
            segment = _merged_segment(run, extent, bool(marks), expired)
            failpoint.reached("log.merge_before_publish")
            self._storage.publish(run, segment, staged)
        failpoint.reached("log.merge_after_publish")
        for old in run:
            self._storage.remove(view.stored[old])
            failpoint.reached("log.merge_removing")
        return segment

    def _write(
        self, staged: StagedFile, rows: Iterable[pa.Table], metadata: segment_file.Metadata
    ) -> segment_file.Extent:
        extent = segment_file.Extent()
        parquet = segment_file.SegmentFile(staged.file, "zstd", _LEVEL, by_bucket=self._by_bucket)
        for group in _row_groups(rows):
            extent = extent.with_more(segment_file.Extent.of(group))
            parquet.write(group)
        parquet.finish(metadata)
        staged.file.flush()
        return extent


def sizes_of(view: View) -> dict[Segment, int]:
    """Bytes on disk of every segment that is not superseded."""
    floor = () if view.chain.floor is None else (view.chain.floor,)
    return {segment: view.stored[segment].size for segment in (*floor, *view.chain.kept)}


def _merged_segment(run: Sequence[Segment], extent: segment_file.Extent, marks: bool, expired: bool) -> Segment:
    end = run[-1].end
    first, last = (extent.first, extent.last) if extent.rows else (run[0].first, run[-1].last)
    generation = max(segment.generation for segment in run)
    # The expired segment is replaced again and again, so its generation must not grow each time: of two segments of
    # one generation the longer range is the newer one.
    if not expired or len(run) == 1 or generation == 0:
        generation += 1
    return Segment(
        run[0].start, run[-1].stop, generation, Lsn(first), Lsn(last), end, extent.rows, extent.newest, marks, expired
    )


def _cuts(view: View, segment: Segment) -> Sequence[segment_file.Cut]:
    if segment.start == segment.stop:
        return (segment_file.Cut(segment.stop, segment.end, segment.rows, segment.newest),)
    return segment_file.metadata(view.stored[segment], segment).cuts


def _batches(view: View, segment: Segment) -> Iterator[pa.Table]:
    return segment_file.batches(view.stored[segment], segment, 0, segment.rows)


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Row groups large enough to be read on their own, small enough for memory."""
    pending: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        pending.append(table)
        rows += table.num_rows
        size += table.nbytes
        if rows >= segment_file.GROUP_ROWS or size >= _GROUP_BYTES:
            yield pa.concat_tables(pending)
            pending, rows, size = [], 0, 0
    yield pa.concat_tables(pending) if pending else LOG_SCHEMA.empty_table()

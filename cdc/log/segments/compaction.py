"""Compaction by key: removes row versions from history that no reader needs. Runs only on request.

Per key, compaction keeps the newest complete change and everything after it: a newer change that lacks unchanged
columns is useless without the one that has them. Deletes are complete; truncates and messages are always kept.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.segments import segment_file
from cdc.log.segments.merge import SegmentMerger, sizes_of
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.storage import View
from cdc.model import LOG_SCHEMA


def compact(history: SegmentMerger, protected: int | None) -> int:
    """Compact merged segments that every registered consumer has read; returns the number of removed rows.

    `protected` is the last sequence number that every consumer has read (None: no consumer is registered).
    """
    view = history.view()
    chosen = [
        segment
        for segment in view.chain.kept
        if segment.generation > 0 and (protected is None or segment.stop <= protected)
    ]
    newest = _newest_complete(view, chosen)
    removed = 0
    for segment in chosen:
        removed += _rewrite(history, view, segment, newest)
    return removed


def count_replaced(view: View, protected: int | None, mergeable: int) -> int:
    """How many rows a compaction would remove after a merge of everything that all consumers have read.

    Fresh segments of at least `mergeable` bytes are never merged.
    """
    sizes = sizes_of(view)
    chosen = [
        segment
        for segment in view.chain.kept
        if (segment.generation > 0 or sizes[segment] < mergeable) and (protected is None or segment.stop <= protected)
    ]
    newest = _newest_complete(view, chosen)
    return sum(
        table.num_rows - int(needed(table, newest).sum()) for segment in chosen for table in _tables(view, segment)
    )


def _newest_complete(view: View, chosen: Sequence[Segment]) -> pa.Table:
    """Per key the version of its newest complete change: columns table, key, complete."""
    found = [_complete(table) for segment in chosen for table in _tables(view, segment)]
    if not found:
        return _complete(LOG_SCHEMA.empty_table())
    return _greatest(pa.concat_tables(found))


def _tables(view: View, segment: Segment) -> Iterator[pa.Table]:
    return segment_file.batches(view.stored[segment], segment, 0, segment.rows)


def _complete(table: pa.Table) -> pa.Table:
    """The greatest version of each key's complete changes in one table."""
    lacking = pc.greater(pc.list_value_length(table["unchanged"]), pa.scalar(0))
    whole = table.filter(pc.and_not(pc.is_valid(table["key"]), pc.fill_null(lacking, False)))
    return _greatest(whole.select(["table", "key", "version"]).rename_columns(["table", "key", "complete"]))


def _greatest(table: pa.Table) -> pa.Table:
    grouped = table.group_by(["table", "key"], use_threads=False).aggregate([("complete", "max")])
    return grouped.select(["table", "key", "complete_max"]).rename_columns(["table", "key", "complete"])


def needed(table: pa.Table, newest: pa.Table) -> npt.NDArray[np.bool_]:
    """Which rows to keep: those at or after their key's newest complete change, and those without a key."""
    numbers = pa.array(np.arange(table.num_rows))
    indexed = table.select(["table", "key", "version"]).append_column("row", numbers)
    joined = indexed.join(newest, ["table", "key"], join_type="inner", use_threads=False)
    older = joined.filter(pc.field("version") < pc.field("complete"))["row"]
    keep = np.ones(table.num_rows, np.bool_)
    keep[older.to_numpy()] = False
    return keep


def _rewrite(history: SegmentMerger, view: View, segment: Segment, newest: pa.Table) -> int:
    table = segment_file.rows(view.stored[segment], segment)
    keep = needed(table, newest)
    kept = table.filter(pa.array(keep))
    if kept.num_rows == table.num_rows:
        return 0
    cuts = _adjust_cuts(segment_file.metadata(view.stored[segment], segment).cuts, keep)
    history.replace(view, (segment,), (kept,), cuts)
    return int(table.num_rows - kept.num_rows)


def _adjust_cuts(cuts: Sequence[segment_file.Cut], keep: npt.NDArray[np.bool_]) -> list[segment_file.Cut]:
    adjusted = []
    at = 0
    for cut in cuts:
        left = int(keep[at : at + cut.rows].sum())
        adjusted.append(segment_file.Cut(cut.sequence, cut.end, left, cut.newest))
        at += cut.rows
    return adjusted

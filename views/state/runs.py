"""Sorted runs: immutable rows ordered by key, the newest entry of a row in the newest run. Pure.

A run's rows are ordered by `_key` (the hash of what they are looked up by) and `_row` (the hash of what identifies the
row below its key). `_live` false marks a row as removed: it hides the row of older runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cdc.arrays import Bools, Ints
from views.state.key_hash import Hashes

KEY, ROW, LIVE = "_key", "_row", "_live"
_OWN = [pa.field(KEY, pa.uint64()), pa.field(ROW, pa.uint64()), pa.field(LIVE, pa.bool_())]


def run_schema(columns: pa.Schema) -> pa.Schema:
    """The columns of a run whose rows have these columns."""
    return pa.schema([*_OWN, *columns])


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of `run_schema`, at most one entry for each pair of key and row, in that order."""

    rows: pa.Table
    keys: Hashes
    name: str = ""
    """The file it is stored in; empty: only in memory."""

    @classmethod
    def of(cls, rows: pa.Table, name: str = "") -> "Run":
        """Rows that are in order."""
        return cls(rows, _numbers(rows, KEY), name)

    def __len__(self) -> int:
        return len(self.keys)


def sorted_run(rows: pa.Table) -> Run:
    """Rows in any order as a run. Of several entries of one row, the last one in `rows` wins."""
    return Run.of(_newest(rows, keep_removed=True))


def merged(runs: Sequence[Run], *, keep_removed: bool) -> Run:
    """Runs, oldest first, as one. Entries of removed rows can go only if no older run is left out."""
    return Run.of(_newest(pa.concat_tables([run.rows for run in runs]), keep_removed=keep_removed))


def found(runs: Sequence[Run], wanted: Hashes, empty: pa.Table) -> pa.Table:
    """The live rows with these keys, which are in order and distinct; `empty` has their columns."""
    parts = [part for run in runs if (part := _matching(run, wanted)) is not None]
    if not parts:
        return empty
    if len(parts) == 1:
        return parts[0].filter(parts[0].column(LIVE))
    return _newest(pa.concat_tables(parts), keep_removed=False)


def pieces(runs: Sequence[Run], size: int) -> Iterator[pa.Table]:
    """The live rows of all runs in the order of their keys, in pieces of about `size` entries. A piece is merged by
    itself: memory depends on its size, not on that of the runs."""
    keys = np.concatenate([run.keys[::size] for run in runs] or [np.zeros(0, np.uint64)])
    bounds = np.unique(keys)[1:]
    cuts = [[0, *np.searchsorted(run.keys, bounds).tolist(), len(run)] for run in runs]
    for number in range(len(bounds) + 1 if runs else 0):
        slices = [
            run.rows.slice(cut[number], cut[number + 1] - cut[number]) for run, cut in zip(runs, cuts, strict=True)
        ]
        yield _newest(pa.concat_tables(slices), keep_removed=False)


def _matching(run: Run, wanted: Hashes) -> pa.Table | None:
    if not len(run) or not len(wanted):
        return None
    first, last = np.searchsorted(run.keys, wanted, "left"), np.searchsorted(run.keys, wanted, "right")
    counts = last - first
    places = spread(first, counts)
    return run.rows.take(places) if len(places) else None


def spread(starts: Ints, counts: Ints) -> Ints:
    """The numbers of all ranges, one after the other: `starts` 5, 9 and `counts` 2, 3 give 5, 6, 9, 10, 11."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))


def _newest(rows: pa.Table, *, keep_removed: bool) -> pa.Table:
    """The last entry of each row, in the order of a run."""
    keys, numbers = _numbers(rows, KEY), _numbers(rows, ROW)
    order = np.lexsort((numbers, keys))  # stable: entries of one row stay in the order in which they came
    keys, numbers = keys[order], numbers[order]
    kept: Bools = np.ones(len(order), np.bool_)
    kept[:-1] = (keys[1:] != keys[:-1]) | (numbers[1:] != numbers[:-1])
    if not keep_removed:
        kept &= rows.column(LIVE).to_numpy()[order]
    return rows.take(order[kept]).combine_chunks()


def _numbers(rows: pa.Table, name: str) -> Hashes:
    column = rows.column(name).combine_chunks()
    numbers: Hashes = column.to_numpy(zero_copy_only=False)
    return numbers

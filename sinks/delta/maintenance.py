"""Maintenance of a Delta table while it is written: sorts files, evens their sizes, removes old tombstones and files.

Each step is a commit of its own. Where the stream commits first, the step is repeated in halves or left to the next
round.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from cdc.arrays import AnyArray
from sinks.delta.files.transaction_log import file_name, selections
from sinks.delta.rows.changes import sorted_by
from sinks.delta.schema.layout import COMMITTED, DELETED, TableLayout
from sinks.delta.write.merge import fence, overwrite
from sinks.delta.write.region import Files, literal, quoted
from sinks.delta.write.writer import REGION_LIMIT, files, scanned, statistic, target_size

Objects: TypeAlias = npt.NDArray[np.object_]

SPARE_FILES = 8
"""A key range is rewritten when it has this many files more than twice what its size needs."""

DELETED_SHARE = 0.05
"""The share of a file's rows in its deletion vector from which the file is rewritten."""

_RETENTION = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")


@dataclass(frozen=True, slots=True)
class MaintenancePolicy:
    """How long tombstones and old versions are kept."""

    tombstones: timedelta
    """How long tombstones are kept. A replay of older changes could bring a deleted row back."""
    history: timedelta
    """How far time travel reaches: files that no newer version needs are removed."""
    vector_files: bool = False
    """Whether another program keeps deletion vectors in files beside the table's. Then files that no commit has (of
    killed writers, or staged and never committed) stay: `deltalake` might take these for such a file."""


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """What a round did. `yielded` counts steps that failed because the stream committed first."""

    purged: int = 0
    rewritten: int = 0
    removed: int = 0
    yielded: int = 0


@dataclass(frozen=True, slots=True)
class _KeyRange:
    """Neighbouring files in key order: rows from the first of `starts`, the least keys of the files, to before `end`
    (None: without an end)."""

    starts: tuple[Any, ...]
    end: Any = None

    def condition(self, column: str) -> str:
        low = f"{quoted(column)} >= {literal(self.starts[0])}"
        return low if self.end is None else f"{low} AND {quoted(column)} < {literal(self.end)}"

    def halves(self) -> list["_KeyRange"]:
        """Empty for a single file."""
        half = len(self.starts) // 2
        return (
            [_KeyRange(self.starts[:half], self.starts[half]), _KeyRange(self.starts[half:], self.end)] if half else []
        )


SetProperties = Callable[[DeltaTable, Mapping[str, str]], None]


def maintain(
    table: DeltaTable, layout: TableLayout, policy: MaintenancePolicy, now: datetime, set_properties: SetProperties
) -> MaintenanceResult:
    """One round. Safe at any time, with other writers: where the stream commits first, a range is tried in halves."""
    purged = rewritten = yielded = 0
    waiting = _ranges_to_rewrite(table, layout, now - policy.tombstones)
    while waiting:
        key_range = waiting.pop()
        try:
            purged += _rewrite_range(table, layout, key_range, now - policy.tombstones)
            rewritten += 1
        except CommitFailedError:
            waiting += key_range.halves()
            yielded += 1
        table.update_incremental()
    hours = int(policy.history.total_seconds() // 3600)
    _limit_log(table, hours, set_properties)
    table.create_checkpoint()
    removed = table.vacuum(
        retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=not policy.vector_files
    )
    table.cleanup_metadata()
    return MaintenanceResult(purged, rewritten, len(removed), yielded)


def _limit_log(table: DeltaTable, hours: int, set_properties: SetProperties) -> None:
    """Let checkpoints remove older commits: a thousand of them cost every batch a millisecond of listing."""
    wanted = dict.fromkeys(_RETENTION, f"interval {hours} hours")
    set_already = table.metadata().configuration
    if any(set_already.get(name) != value for name, value in wanted.items()):
        with suppress(CommitFailedError):
            set_properties(table, wanted)
            table.update_incremental()


def _ranges_to_rewrite(table: DeltaTable, layout: TableLayout, before: datetime) -> list[_KeyRange]:
    """The key ranges to rewrite, each small enough for memory; none for keys without bounds."""
    found = files(table, layout)
    if not layout.compared or not len(found.bytes) or None in found.lows[0] or None in found.highs[0]:
        _compact(table, found.bytes)
        return []
    file_size = target_size(int(found.bytes.sum()))
    old = _with_old_tombstones(table, before) & (not layout.history)
    due = old | _with_many_deleted(table, found)
    lows, highs = np.array(found.lows[0], object), np.array(found.highs[0], object)
    ranges = []
    for key_range in _key_ranges(found):
        touched = np.flatnonzero((highs >= key_range.starts[0]) & (key_range.end is None or lows < key_range.end))
        size = int(found.bytes[touched].sum())
        if size > 2 * REGION_LIMIT:
            table.optimize.z_order(
                list(layout.key),
                target_size=file_size,
                commit_properties=fence(table),
                writer_properties=layout.encodings,
            )
            return []
        crowded = len(touched) > SPARE_FILES + 2 * size // file_size
        if crowded or _overlapping(touched.tolist(), lows, highs) or due[touched].any():
            ranges.append(key_range)
    return ranges


def _overlapping(group: list[int], lows: Objects, highs: Objects) -> bool:
    """Whether a file overlaps four on average: so after appends in random order, and every change then costs four."""
    pairs = sum(bool(lows[one] <= highs[other] and highs[one] >= lows[other]) for one in group for other in group)
    return pairs > 4 * len(group)


def _key_ranges(found: Files) -> Iterator[_KeyRange]:
    """The whole table, in key ranges of about half of what is rewritten at once."""
    sizes: dict[Any, int] = {}
    for low, size in zip(found.lows[0], found.bytes.tolist(), strict=True):
        sizes[low] = sizes.get(low, 0) + size
    starts: list[Any] = []
    total = 0
    for low in sorted(sizes):
        if starts and total + sizes[low] > REGION_LIMIT // 2:
            yield _KeyRange(tuple(starts), low)
            starts, total = [], 0
        starts.append(low)
        total += sizes[low]
    yield _KeyRange(tuple(starts))


def _with_many_deleted(table: DeltaTable, found: Files) -> npt.NDArray[np.bool_]:
    """Files with many rows in their deletion vector: every reader has to skip them."""
    gone = {name: rows.count(False) for name, rows in selections(table).items()}
    shares = [
        gone.get(file_name(path), 0) > DELETED_SHARE * rows for path, rows in zip(found.paths, found.rows, strict=True)
    ]
    return np.array(shares, np.bool_)


def _with_old_tombstones(table: DeltaTable, before: datetime) -> npt.NDArray[np.bool_]:
    """Files that may have a tombstone from before that time, by their statistics."""
    actions = pa.table(table.get_add_actions(flatten=True))
    flags = [flag is not False for flag in statistic(actions, f"max.{DELETED}")]
    oldest = [when is None or when < before for when in statistic(actions, f"min.{COMMITTED}")]
    return np.array([flag and old for flag, old in zip(flags, oldest, strict=True)], np.bool_)


def _rewrite_range(table: DeltaTable, layout: TableLayout, key_range: _KeyRange, before: datetime) -> int:
    """Rewrite the rows of a range, sorted, without old tombstones; returns how many tombstones were removed."""
    condition = key_range.condition(layout.compared[0])
    rows = scanned(table, layout, layout.arrow.names, condition)
    kept = rows if layout.history else _without_tombstones(rows, before)  # ended rows are the history
    kept = sorted_by(kept, layout.key)
    file_size = target_size(int(files(table, layout).bytes.sum()))
    overwrite(table, kept, condition, layout, file_size=file_size, own=fence(table))
    return rows.num_rows - kept.num_rows


def _without_tombstones(rows: pa.Table, before: datetime) -> pa.Table:
    committed, deleted = rows[COMMITTED], rows[DELETED]
    old: AnyArray = pc.less(committed, pa.scalar(before, committed.type))
    kept: AnyArray = pc.invert(pc.and_(deleted, old.fill_null(False)))
    return rows.filter(kept)


def _compact(table: DeltaTable, sizes: npt.NDArray[np.int64]) -> None:
    """Keys without bounds: pack small files, unsorted."""
    file_size = target_size(int(sizes.sum()))
    if len(sizes) > SPARE_FILES + 2 * int(sizes.sum()) // file_size:
        table.optimize.compact(target_size=file_size)

"""Care for a Delta table beside the stream: files sorted and of fair size, old tombstones and old files gone.

Each step is a commit of its own and gives way: where the stream wins, the step is left to the next round.
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
from sinks.delta.rows.changes import sorted_by
from sinks.delta.schema.layout import COMMITTED, DELETED, TableLayout
from sinks.delta.transaction_log import file_name, selections
from sinks.delta.write.merge import fence, overwrite, quoted
from sinks.delta.write.region import Files, literal
from sinks.delta.write.writer import REGION_LIMIT, files, scanned, target_size

Objects: TypeAlias = npt.NDArray[np.object_]

SPARE_FILES = 8
"""A stretch of files is rewritten when it has this many more than twice what its size asks for."""

MARKED_SHARE = 0.05
"""Of a file's rows, so many may be marked as gone before it is rewritten."""

_RETENTION = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")


@dataclass(frozen=True, slots=True)
class MaintenancePolicy:
    """How long things are kept."""

    tombstones: timedelta
    """Deleted rows are remembered for this long. A replay that reaches further back could bring one back."""
    history: timedelta
    """Files that no version newer than this needs are removed: time travel ends here."""


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """What a round did. `yielded` counts steps that the stream was faster than."""

    purged: int = 0
    rewritten: int = 0
    removed: int = 0
    yielded: int = 0


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring files in key order: the rows from the least key of the first to before `end` (None: all beyond)."""

    starts: tuple[Any, ...]
    end: Any = None

    def condition(self, column: str) -> str:
        low = f"{quoted(column)} >= {literal(self.starts[0])}"
        return low if self.end is None else f"{low} AND {quoted(column)} < {literal(self.end)}"

    def halves(self) -> list["_Stretch"]:
        """None for a single file."""
        half = len(self.starts) // 2
        return [_Stretch(self.starts[:half], self.starts[half]), _Stretch(self.starts[half:], self.end)] if half else []


SetProperties = Callable[[DeltaTable, Mapping[str, str]], None]


def maintain(
    table: DeltaTable, layout: TableLayout, care: MaintenancePolicy, now: datetime, set_properties: SetProperties
) -> MaintenanceResult:
    """One round. Safe at any time and beside any writer: where the stream is faster, a stretch is tried in halves."""
    purged = rewritten = yielded = 0
    waiting = _worn(table, layout, now - care.tombstones)
    while waiting:
        stretch = waiting.pop()
        try:
            purged += _tidy(table, layout, stretch, now - care.tombstones)
            rewritten += 1
        except CommitFailedError:
            waiting += stretch.halves()
            yielded += 1
        table.update_incremental()
    hours = int(care.history.total_seconds() // 3600)
    _limit_log(table, hours, set_properties)
    table.create_checkpoint()
    removed = table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False)
    table.cleanup_metadata()
    return MaintenanceResult(purged, rewritten, len(removed), yielded)


def _limit_log(table: DeltaTable, hours: int, set_properties: SetProperties) -> None:
    """Let checkpoints remove older commits: each thousand of them costs every batch a millisecond of listing."""
    wanted = dict.fromkeys(_RETENTION, f"interval {hours} hours")
    set_already = table.metadata().configuration
    if any(set_already.get(name) != value for name, value in wanted.items()):
        with suppress(CommitFailedError):
            set_properties(table, wanted)
            table.update_incremental()


def _worn(table: DeltaTable, layout: TableLayout, before: datetime) -> list[_Stretch]:
    """Stretches worth rewriting, each small enough for memory; nothing for keys that have no bounds."""
    found = files(table, layout)
    if not layout.compared or not len(found.bytes) or None in found.lows[0] or None in found.highs[0]:
        _compact(table, found.bytes)
        return []
    fair = target_size(int(found.bytes.sum()))
    old = _with_old_tombstones(table, before) & (not layout.history)
    due = old | _marked(table, found)
    lows, highs = np.array(found.lows[0], object), np.array(found.highs[0], object)
    stretches = []
    for stretch in _stretches(found):
        met = np.flatnonzero((highs >= stretch.starts[0]) & (stretch.end is None or lows < stretch.end))
        size = int(found.bytes[met].sum())
        if size > 2 * REGION_LIMIT:
            table.optimize.z_order(
                list(layout.key), target_size=fair, commit_properties=fence(table), writer_properties=layout.encodings
            )
            return []
        crowded = len(met) > SPARE_FILES + 2 * size // fair
        if crowded or _overlapping(met.tolist(), lows, highs) or due[met].any():
            stretches.append(stretch)
    return stretches


def _overlapping(group: list[int], lows: Objects, highs: Objects) -> bool:
    """Whether a file meets four on average: appends in random order do that, and every change then costs four."""
    met = sum(bool(lows[one] <= highs[other] and highs[one] >= lows[other]) for one in group for other in group)
    return met > 4 * len(group)


def _stretches(found: Files) -> Iterator[_Stretch]:
    """The whole table, in parts of about half of what is rewritten at once."""
    sizes: dict[Any, int] = {}
    for low, size in zip(found.lows[0], found.bytes.tolist(), strict=True):
        sizes[low] = sizes.get(low, 0) + size
    starts: list[Any] = []
    total = 0
    for low in sorted(sizes):
        if starts and total + sizes[low] > REGION_LIMIT // 2:
            yield _Stretch(tuple(starts), low)
            starts, total = [], 0
        starts.append(low)
        total += sizes[low]
    yield _Stretch(tuple(starts))


def _marked(table: DeltaTable, found: Files) -> npt.NDArray[np.bool_]:
    """Files of whose rows a good part is marked as gone: readers pass over them again and again."""
    gone = {name: rows.count(False) for name, rows in selections(table).items()}
    shares = [
        gone.get(file_name(path), 0) > MARKED_SHARE * rows for path, rows in zip(found.paths, found.rows, strict=True)
    ]
    return np.array(shares, np.bool_)


def _with_old_tombstones(table: DeltaTable, before: datetime) -> npt.NDArray[np.bool_]:
    """Files that may hold a tombstone from before that time, by their statistics."""
    actions = pa.table(table.get_add_actions(flatten=True))
    flags = [flag is not False for flag in _values(actions, f"max.{DELETED}")]
    oldest = [when is None or when < before for when in _values(actions, f"min.{COMMITTED}")]
    return np.array([flag and old for flag, old in zip(flags, oldest, strict=True)], np.bool_)


def _values(actions: pa.Table, name: str) -> list[Any]:
    return actions[name].to_pylist() if name in actions.column_names else [None] * actions.num_rows


def _tidy(table: DeltaTable, layout: TableLayout, stretch: _Stretch, before: datetime) -> int:
    """Write the rows of a stretch again, sorted, without old tombstones; returns how many of these there were."""
    condition = stretch.condition(layout.compared[0])
    rows = scanned(table, layout, layout.arrow.names, condition)
    kept = rows if layout.history else _without_tombstones(rows, before)  # what has ended is the history itself
    kept = sorted_by(kept, layout.key)
    fair = target_size(int(files(table, layout).bytes.sum()))
    overwrite(table, kept, condition, layout, file_size=fair, own=fence(table))
    return rows.num_rows - kept.num_rows


def _without_tombstones(rows: pa.Table, before: datetime) -> pa.Table:
    committed, deleted = rows[COMMITTED], rows[DELETED]
    old: AnyArray = pc.less(committed, pa.scalar(before, committed.type))
    kept: AnyArray = pc.invert(pc.and_(deleted, old.fill_null(False)))
    return rows.filter(kept)


def _compact(table: DeltaTable, sizes: npt.NDArray[np.int64]) -> None:
    """Keys without bounds: pack small files, in whatever order."""
    fair = target_size(int(sizes.sum()))
    if len(sizes) > SPARE_FILES + 2 * int(sizes.sum()) // fair:
        table.optimize.compact(target_size=fair)

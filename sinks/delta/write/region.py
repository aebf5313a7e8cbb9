"""The region of a Delta table that a batch touches: boxes of key values, along the bounds of its files. Pure.

The region decides cost, never correctness: every key of the batch is in some box, whatever the statistics say, and all
rows inside the boxes are read, changed and written back. Boxes follow file bounds, so that no file is split, and a new
key goes to the neighbouring file while that is small: files stay sorted and do not overlap, and a batch of new keys
costs one small file, not a scan.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.arrays import Ints

MAX_BOXES = 32
"""Each box is two comparisons per row that is read: 32 boxes cost up to a second of CPU per million rows."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a table: sizes, and the bounds of the compared key columns, one sequence per column."""

    bytes: Ints
    rows: Ints
    lows: tuple[Sequence[object], ...]
    highs: tuple[Sequence[object], ...]
    paths: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """Boxes, and the size of the files that they overlap."""

    names: tuple[str, ...]
    boxes: tuple[tuple[tuple[object, object], ...], ...]
    """For each box, the least and the greatest value of each column."""
    bytes: int
    rows: int
    files: int
    new: bool
    """No key of the batch can be stored yet."""
    overlapped: tuple[int, ...] = ()
    """The numbers of the files that the boxes overlap."""

    def condition(self, prefix: str = "") -> str:
        """SQL that is true exactly for the rows inside the boxes."""
        return " OR ".join(f"({' AND '.join(self._sides(prefix, box))})" for box in self.boxes)

    def _sides(self, prefix: str, box: Sequence[tuple[object, object]]) -> Iterator[str]:
        for name, (low, high) in zip(self.names, box, strict=True):
            column = prefix + quoted(name)
            yield f"{column} >= {literal(low)} AND {column} <= {literal(high)}"


def bounded(type_: pa.DataType) -> bool:
    """Whether values of this type can be compared with file statistics and written as literals without loss."""
    return bool(pa.types.is_integer(type_) or type_ == pa.string())


def region(names: Sequence[str], keys: pa.Table, files: Files, small: int) -> Region | None:
    """The part of the table where these keys are, or would be; None if some file has no bounds.

    `small` is the size in bytes below which a file takes neighbouring new keys.
    """
    columns = [keys[name].to_pylist() for name in names]
    if any(value is None for bounds in (*files.lows, *files.highs) for value in bounds):
        return None
    ranks = [_ranks(*three) for three in zip(columns, files.lows, files.highs, strict=True)]
    keyed = np.array([rank.of(column) for rank, column in zip(ranks, columns, strict=True)])
    lows = np.array([rank.of(bounds) for rank, bounds in zip(ranks, files.lows, strict=True)])
    highs = np.array([rank.of(bounds) for rank, bounds in zip(ranks, files.highs, strict=True)])
    boxes, any_stored = _boxes(keyed, lows, highs, files.bytes < small)
    boxes = _neighbours(_whole_files(_fewer(_neighbours(boxes, lows, highs)), lows, highs), lows, highs)
    overlapped = _overlapped(boxes, lows, highs)
    exact = all(pa.types.is_integer(keys.schema.field(name).type) for name in names)
    return Region(
        tuple(names),
        tuple(_values(ranks, box) for box in boxes),
        int(files.bytes[overlapped].sum()),
        int(files.rows[overlapped].sum()),
        int(overlapped.sum()),
        exact and not any_stored,
        tuple(np.flatnonzero(overlapped).tolist()),
    )


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The values of one column, each with its rank in their sorted order."""

    values: list[object]
    ranks: dict[object, int]

    def of(self, values: Iterable[object]) -> Ints:
        return np.array([self.ranks[value] for value in values], np.int64)


def _ranks(*groups: Sequence[object]) -> _Ranks:
    values = sorted({value for group in groups for value in group})  # type: ignore[type-var]
    return _Ranks(values, {value: rank for rank, value in enumerate(values)})


def _boxes(keys: Ints, lows: Ints, highs: Ints, small: npt.NDArray[np.bool_]) -> tuple[list[Ints], bool]:
    """A box per file that has or takes keys of the batch, and one per gap for the others. A box is [columns, 2]."""
    order = np.argsort(keys[0], kind="stable")
    keys = keys[:, order]
    owner = np.full(keys.shape[1], -1)
    firsts, lasts = np.searchsorted(keys[0], lows[0]), np.searchsorted(keys[0], highs[0], side="right")
    for file in np.flatnonzero(lasts > firsts).tolist():
        mine = slice(firsts[file], lasts[file])
        part = keys[1:, mine]
        inside = ((part >= lows[1:, file, None]) & (part <= highs[1:, file, None])).all(axis=0)
        owner[mine][inside] = file
    any_stored = bool((owner >= 0).any())
    targets = _targets(keys[0], owner, lows[0], small)
    order = np.argsort(targets, kind="stable")
    found, starts = np.unique(targets[order], return_index=True)
    low, high = (side.reduceat(keys[:, order], starts, axis=1) for side in (np.minimum, np.maximum))
    is_file, files = found >= 0, found[found >= 0]
    low[:, is_file] = np.minimum(low[:, is_file], lows[:, files])
    high[:, is_file] = np.maximum(high[:, is_file], highs[:, files])
    return list(np.stack([low, high], axis=2).transpose(1, 0, 2)), any_stored


def _targets(keys: Ints, owner: Ints, lows: Ints, small: npt.NDArray[np.bool_]) -> Ints:
    """The file that each key goes to, or a negative number for the gap that it is in."""
    by_low = np.argsort(lows, kind="stable")
    if not len(by_low):
        return np.full(len(keys), -1)
    before = np.maximum(np.searchsorted(lows[by_low], keys, side="right") - 1, 0)
    beside = by_low[before]
    neighbour = np.where(small[beside], beside, -1 - before)
    return np.where(owner >= 0, owner, neighbour)


def _fewer(boxes: list[Ints]) -> list[Ints]:
    """At most MAX_BOXES boxes: neighbours with the smallest gaps between them are joined."""
    boxes = sorted(boxes, key=lambda box: (box[0, 0], box[0, 1]))
    if len(boxes) <= MAX_BOXES:
        return boxes
    gaps = np.array([right[0, 0] - left[0, 1] for left, right in pairwise(boxes)])
    cuts = np.sort(np.argsort(gaps, kind="stable")[-(MAX_BOXES - 1) :]) + 1
    groups = (boxes[start:end] for start, end in pairwise([0, *cuts.tolist(), len(boxes)]))
    return [_around(group) for group in groups]


def _neighbours(boxes: list[Ints], lows: Ints, highs: Ints) -> list[Ints]:
    """Join boxes that have no other file between them."""
    joined: list[Ints] = []
    for box in sorted(boxes, key=lambda box: (int(box[0, 0]), int(box[0, 1]))):
        if joined:
            both = _around([joined[-1], box])
            if (_overlapped([both], lows, highs) == _overlapped([joined[-1], box], lows, highs)).all():
                joined[-1] = both
                continue
        joined.append(box)
    return joined


def _whole_files(boxes: list[Ints], lows: Ints, highs: Ints) -> list[Ints]:
    """Grow the boxes until no file is split and no two boxes overlap.

    The rest of a split file would become one file from its first key to its last, which every batch would touch.
    """
    while True:
        grown = _apart([_with_files(box, lows, highs) for box in boxes])
        if len(grown) == len(boxes) and all((new == old).all() for new, old in zip(grown, boxes, strict=True)):
            return grown
        boxes = grown


def _with_files(box: Ints, lows: Ints, highs: Ints) -> Ints:
    overlapped = ((lows <= box[:, 1, None]) & (highs >= box[:, 0, None])).all(axis=0)
    if not overlapped.any():
        return box
    low, high = lows[:, overlapped].min(axis=1), highs[:, overlapped].max(axis=1)
    return np.stack([np.minimum(box[:, 0], low), np.maximum(box[:, 1], high)], axis=1)


def _apart(boxes: Sequence[Ints]) -> list[Ints]:
    """Join boxes that overlap."""
    apart: list[Ints] = []
    for box in sorted(boxes, key=lambda box: int(box[0, 0])):
        if apart and ((apart[-1][:, 0] <= box[:, 1]) & (apart[-1][:, 1] >= box[:, 0])).all():
            apart[-1] = _around([apart[-1], box])
        else:
            apart.append(box)
    return apart


def _around(boxes: Sequence[Ints]) -> Ints:
    stacked = np.stack(boxes)
    return np.stack([stacked[:, :, 0].min(axis=0), stacked[:, :, 1].max(axis=0)], axis=1)


def _overlapped(boxes: Sequence[Ints], lows: Ints, highs: Ints) -> npt.NDArray[np.bool_]:
    overlapped = np.zeros(lows.shape[1], np.bool_)
    for box in boxes:
        overlapped |= ((lows <= box[:, 1, None]) & (highs >= box[:, 0, None])).all(axis=0)
    return overlapped


def _values(ranks: Sequence[_Ranks], box: Ints) -> tuple[tuple[object, object], ...]:
    sides = zip(ranks, box.tolist(), strict=True)
    return tuple((rank.values[low], rank.values[high]) for rank, (low, high) in sides)


def literal(value: object) -> str:
    """A value of a bounded type in an SQL expression."""
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def quoted(name: str) -> str:
    """A column's name in an SQL expression."""
    return '"' + name.replace('"', '""') + '"'

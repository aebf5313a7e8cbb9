"""Which part of a Delta table a batch touches: boxes of key values, drawn along the bounds of its files. Pure.

The region decides cost, never correctness: every key of the batch lies in some box, whatever the statistics say, and
the rows inside the boxes are read, changed and written back as a whole. Boxes follow file bounds, so that no file is
cut in two, and a new key goes to the file beside it while that is small: files stay sorted and apart, and a batch
of new keys costs one small file, not a scan.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.arrays import Ints

MAX_BOXES = 32
"""Each box is two comparisons for every row that is read: 32 of them cost a million rows up to a second of CPU."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a table: sizes, and bounds of the columns that keys are compared by, one row per column."""

    bytes: Ints
    rows: Ints
    lows: tuple[Sequence[object], ...]
    highs: tuple[Sequence[object], ...]
    paths: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """Boxes, and what the files that they meet hold."""

    names: tuple[str, ...]
    boxes: tuple[tuple[tuple[object, object], ...], ...]
    """Of each box, the least and the greatest value of each column."""
    bytes: int
    rows: int
    files: int
    new: bool
    """No key of the batch can be stored yet."""
    met: tuple[int, ...] = ()
    """The numbers of the files that they meet."""

    def condition(self, prefix: str = "") -> str:
        """True for the rows inside, and for no other."""
        return " OR ".join(f"({' AND '.join(self._sides(prefix, box))})" for box in self.boxes)

    def _sides(self, prefix: str, box: Sequence[tuple[object, object]]) -> Iterator[str]:
        for name, (low, high) in zip(self.names, box, strict=True):
            column = prefix + '"' + name.replace('"', '""') + '"'
            yield f"{column} >= {literal(low)} AND {column} <= {literal(high)}"


def bounded(type_: pa.DataType) -> bool:
    """Whether keys of this type can be compared with file statistics and written as literals without loss."""
    return bool(pa.types.is_integer(type_) or type_ == pa.string())


def region(names: Sequence[str], keys: pa.Table, files: Files, small: int) -> Region | None:
    """The part of the table where these keys lie, or would lie; None if some file has no bounds.

    `small` is the size in bytes below which a file takes in new keys beside it.
    """
    columns = [keys[name].to_pylist() for name in names]
    if any(value is None for bounds in (*files.lows, *files.highs) for value in bounds):
        return None
    ranks = [_ranks(*three) for three in zip(columns, files.lows, files.highs, strict=True)]
    keyed = np.array([rank.of(column) for rank, column in zip(ranks, columns, strict=True)])
    lows = np.array([rank.of(bounds) for rank, bounds in zip(ranks, files.lows, strict=True)])
    highs = np.array([rank.of(bounds) for rank, bounds in zip(ranks, files.highs, strict=True)])
    boxes, any_hit = _boxes(keyed, lows, highs, files.bytes < small)
    boxes = _neighbours(_whole_files(_fewer(_neighbours(boxes, lows, highs)), lows, highs), lows, highs)
    met = _met(boxes, lows, highs)
    exact = all(pa.types.is_integer(keys.schema.field(name).type) for name in names)
    return Region(
        tuple(names),
        tuple(_values(ranks, box) for box in boxes),
        int(files.bytes[met].sum()),
        int(files.rows[met].sum()),
        int(met.sum()),
        exact and not any_hit,
        tuple(np.flatnonzero(met).tolist()),
    )


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Values of one column as their places in the sorted order of all values in play."""

    values: list[object]
    places: dict[object, int]

    def of(self, values: Iterable[object]) -> Ints:
        return np.array([self.places[value] for value in values], np.int64)


def _ranks(*groups: Sequence[object]) -> _Ranks:
    values = sorted({value for group in groups for value in group})  # type: ignore[type-var]
    return _Ranks(values, {value: place for place, value in enumerate(values)})


def _boxes(keys: Ints, lows: Ints, highs: Ints, small: npt.NDArray[np.bool_]) -> tuple[list[Ints], bool]:
    """A box per file that keys fall into or are taken in by, and one per gap for the rest. A box is [columns, 2]."""
    order = np.argsort(keys[0], kind="stable")
    keys = keys[:, order]
    owner = np.full(keys.shape[1], -1)
    firsts, lasts = np.searchsorted(keys[0], lows[0]), np.searchsorted(keys[0], highs[0], side="right")
    for file in np.flatnonzero(lasts > firsts).tolist():
        mine = slice(firsts[file], lasts[file])
        part = keys[1:, mine]
        inside = ((part >= lows[1:, file, None]) & (part <= highs[1:, file, None])).all(axis=0)
        owner[mine][inside] = file
    any_hit = bool((owner >= 0).any())
    homes = _homes(keys[0], owner, lows[0], small)
    order = np.argsort(homes, kind="stable")
    found, starts = np.unique(homes[order], return_index=True)
    low, high = (side.reduceat(keys[:, order], starts, axis=1) for side in (np.minimum, np.maximum))
    held, files = found >= 0, found[found >= 0]
    low[:, held], high[:, held] = np.minimum(low[:, held], lows[:, files]), np.maximum(high[:, held], highs[:, files])
    return list(np.stack([low, high], axis=2).transpose(1, 0, 2)), any_hit


def _homes(keys: Ints, owner: Ints, lows: Ints, small: npt.NDArray[np.bool_]) -> Ints:
    """The file that each key belongs to, or a negative number for the gap that it lies in."""
    by_low = np.argsort(lows, kind="stable")
    if not len(by_low):
        return np.full(len(keys), -1)
    before = np.maximum(np.searchsorted(lows[by_low], keys, side="right") - 1, 0)
    beside = by_low[before]
    lodged = np.where(small[beside], beside, -1 - before)
    return np.where(owner >= 0, owner, lodged)


def _fewer(boxes: list[Ints]) -> list[Ints]:
    """At most MAX_BOXES: neighbours with the least between them become one."""
    boxes = sorted(boxes, key=lambda box: (box[0, 0], box[0, 1]))
    if len(boxes) <= MAX_BOXES:
        return boxes
    gaps = np.array([right[0, 0] - left[0, 1] for left, right in pairwise(boxes)])
    cuts = np.sort(np.argsort(gaps, kind="stable")[-(MAX_BOXES - 1) :]) + 1
    groups = (boxes[start:end] for start, end in pairwise([0, *cuts.tolist(), len(boxes)]))
    return [_around(group) for group in groups]


def _neighbours(boxes: list[Ints], lows: Ints, highs: Ints) -> list[Ints]:
    """Boxes with no other file between them as one: each is two comparisons for every row that is read."""
    joined: list[Ints] = []
    for box in sorted(boxes, key=lambda box: (int(box[0, 0]), int(box[0, 1]))):
        if joined:
            both = _around([joined[-1], box])
            if (_met([both], lows, highs) == _met([joined[-1], box], lows, highs)).all():
                joined[-1] = both
                continue
        joined.append(box)
    return joined


def _whole_files(boxes: list[Ints], lows: Ints, highs: Ints) -> list[Ints]:
    """Boxes grown until no file is cut and no two of them meet.

    The rest of a cut file would be written aside as one file, from its first key to its last: met by every batch.
    """
    while True:
        grown = _apart([_with_files(box, lows, highs) for box in boxes])
        if len(grown) == len(boxes) and all((new == old).all() for new, old in zip(grown, boxes, strict=True)):
            return grown
        boxes = grown


def _with_files(box: Ints, lows: Ints, highs: Ints) -> Ints:
    met = ((lows <= box[:, 1, None]) & (highs >= box[:, 0, None])).all(axis=0)
    if not met.any():
        return box
    low, high = lows[:, met].min(axis=1), highs[:, met].max(axis=1)
    return np.stack([np.minimum(box[:, 0], low), np.maximum(box[:, 1], high)], axis=1)


def _apart(boxes: Sequence[Ints]) -> list[Ints]:
    """Boxes that meet become one."""
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


def _met(boxes: Sequence[Ints], lows: Ints, highs: Ints) -> npt.NDArray[np.bool_]:
    met = np.zeros(lows.shape[1], np.bool_)
    for box in boxes:
        met |= ((lows <= box[:, 1, None]) & (highs >= box[:, 0, None])).all(axis=0)
    return met


def _values(ranks: Sequence[_Ranks], box: Ints) -> tuple[tuple[object, object], ...]:
    sides = zip(ranks, box.tolist(), strict=True)
    return tuple((rank.values[low], rank.values[high]) for rank, (low, high) in sides)


def literal(value: object) -> str:
    """A value of a bounded type in an expression."""
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)

"""Joins of two deltas by equal keys, with both sides kept by key.

The result changes in two steps: first the left side moves on while the right side stays, then the right side does. Each
step looks up only the keys of its own changes. Rows without a match, which outer joins keep, need the number of rows of
each key on the other side, which is counted instead of looked up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Ints
from views.dataflow.delta import ID, SIGN, codes, delta_schema, net, union
from views.state.key_hash import hashes
from views.state.runs import spread
from views.state.table import StateTable

Kind = Literal["inner", "left", "right", "full"]
_COUNT_COLUMNS: Mapping[str, pa.DataType] = {"key": pa.string(), "count": pa.int64()}
_COUNTS = pa.schema(_COUNT_COLUMNS)
_SEPARATOR = "\x1f"
"""Between the ids of a joined row; an id is JSON, which escapes it."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side: the column with the key, all columns of its rows, and what they are called in the result."""

    key: str
    columns: pa.Schema
    names: tuple[str, ...]
    """The name of each column in the result; empty: it is not in it."""


class Join:
    """The rows of both sides with equal keys; a null key equals nothing."""

    def __init__(self, left: Side, right: Side, kind: Kind) -> None:
        self.kind = kind
        self._left, self._right = _Half(left), _Half(right)
        self._columns = pa.schema({**_named(left), **_named(right)})
        self._keeps = {"left": kind in ("left", "full"), "right": kind in ("right", "full")}

    @property
    def schema(self) -> pa.Schema:
        """The columns of the result's rows."""
        return self._columns

    @property
    def tables(self) -> dict[str, StateTable]:
        """The state."""
        found = {"left": self._left.rows, "right": self._right.rows}
        if self.kind != "inner":
            found |= {"left_counts": self._left.counts, "right_counts": self._right.counts}
        return found

    def step(self, left: pa.Table, right: pa.Table) -> pa.Table:
        """The net delta of the result."""
        found = [delta_schema(self._columns).empty_table()]
        found += self._moved(left, self._left, self._right, "left")
        found += self._moved(right, self._right, self._left, "right")
        return net(union(found))

    def _moved(self, delta: pa.Table, own: "_Half", other: "_Half", name: Literal["left", "right"]) -> list[pa.Table]:
        """What changes when `own` moves on by a delta and `other` stays."""
        if not delta.num_rows:
            return []
        matches = other.rows.lookup(hashes(delta.column(own.side.key).drop_null()))
        mine, theirs = _pairs(delta.column(own.side.key), matches.column(other.side.key))
        found = [self._joined(name, delta.take(mine), matches.take(theirs))]
        if self._keeps[name]:
            alone = np.ones(delta.num_rows, np.bool_)
            alone[mine] = False
            found.append(self._joined(name, delta.filter(pa.array(alone)), None))
        if self._keeps["right" if name == "left" else "left"]:
            found.append(self._flipped(name, matches, other.side.key, own.flips(delta)))
        own.put(delta, counted=self.kind != "inner")
        return found

    def _flipped(
        self, name: Literal["left", "right"], rows: pa.Table, key: str, flips: tuple[AnyArray, Ints]
    ) -> pa.Table:
        """The rows of the other side that are alone from now on, or no longer."""
        names, signs = flips
        place = pc.index_in(rows.column(key), value_set=names)
        known = place.is_valid()
        sign = signs[place.filter(known).to_numpy()]
        delta = rows.filter(known).append_column(SIGN, pa.array(sign, pa.int8()))
        return self._joined("right" if name == "left" else "left", delta, None)

    def _joined(self, name: Literal["left", "right"], own: pa.Table, other: pa.Table | None) -> pa.Table:
        """Rows of the result from rows of a delta and their matches; None: there are none, which gives nulls."""
        left, right = (own, other) if name == "left" else (other, own)
        nothing: AnyArray = pa.repeat("", own.num_rows)
        parts = [nothing if rows is None else rows.column(ID) for rows in (left, right)]
        ids: AnyArray = pc.binary_join_element_wise(*parts, _SEPARATOR)  # type: ignore[call-overload]
        columns = [*self._left.shown(left, own.num_rows), *self._right.shown(right, own.num_rows)]
        return pa.Table.from_arrays([ids, own.column(SIGN), *columns], schema=delta_schema(self._columns))


class _Half:
    """The rows of one side by key, and how many each key has."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.rows = StateTable(pa.schema([(ID, pa.string()), *side.columns]))
        self.counts = StateTable(_COUNTS)

    def put(self, delta: pa.Table, *, counted: bool) -> None:
        """Move on by a delta."""
        known = delta.filter(delta.column(self.side.key).is_valid())
        live = known.column(SIGN).to_numpy() > 0
        # A row may leave one key and enter another: each key has its own entry.
        self.rows.put(known.column(self.side.key), known.column(ID), live, known)
        if counted:
            keys, counts, _ = self._changed_counts(known)
            self.counts.put(keys, keys, counts > 0, pa.table({"key": keys, "count": pa.array(counts)}))

    def _changed_counts(self, delta: pa.Table) -> tuple[AnyArray, Ints, Ints]:
        """The keys of a delta, and how many rows each has after and before it."""
        group = codes(delta.column(self.side.key))
        keys = pc.unique(delta.column(self.side.key).combine_chunks())
        change = np.bincount(group, delta.column(SIGN).to_numpy(), len(keys)).astype(np.int64)
        stored = self.counts.lookup(hashes(keys))
        place = pc.index_in(stored.column("key").combine_chunks(), value_set=keys)
        before = np.zeros(len(keys), np.int64)
        known = place.is_valid()
        before[place.filter(known).to_numpy()] = stored.filter(known).column("count").to_numpy()
        return keys, before + change, before

    def flips(self, delta: pa.Table) -> tuple[AnyArray, Ints]:
        """Keys that get their first row (-1: rows of the other side are no longer alone) or lose their last (1)."""
        known = delta.filter(delta.column(self.side.key).is_valid())
        keys, after, before = self._changed_counts(known)
        sign = np.where((before == 0) & (after > 0), -1, np.where((before > 0) & (after == 0), 1, 0))
        rows = np.flatnonzero(sign)
        return keys.take(pa.array(rows)), sign[rows]

    def shown(self, rows: pa.Table | None, count: int) -> list[AnyArray]:
        """The columns of the result that come from this side."""
        found = []
        for field, name in zip(self.side.columns, self.side.names, strict=True):
            if name:
                found.append(pa.nulls(count, field.type) if rows is None else rows.column(field.name))
        return found


def _named(side: Side) -> dict[str, pa.DataType]:
    return {name: field.type for field, name in zip(side.columns, side.names, strict=True) if name}


def _pairs(left: AnyArray, right: AnyArray) -> tuple[Ints, Ints]:
    """The numbers of all pairs of rows with equal keys, in the order of the left rows; null equals nothing."""
    both = codes(pa.chunked_array([*_chunks(left), *_chunks(right)], pa.string()))
    mine, theirs = both[: len(left)].copy(), both[len(left) :]
    mine[left.is_null().to_numpy()] = -1
    order = np.argsort(theirs, kind="stable")
    first, last = (np.searchsorted(theirs[order], mine, side) for side in ("left", "right"))
    return np.repeat(np.arange(len(mine)), last - first), order[spread(first, last - first)]


def _chunks(column: AnyArray) -> list[AnyArray]:
    return list(column.chunks) if isinstance(column, pa.ChunkedArray) else [column]

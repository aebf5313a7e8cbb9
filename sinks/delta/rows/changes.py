"""A folded batch as the typed rows that a merge into Delta takes. Pure.

What cannot be typed is set aside here, row by row, before anything is written.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.errors import RejectedItem, SinkError
from cdc.model import TableSchema
from cdc.ports import Batch
from sinks.delta.rows.images import no_values, typed
from sinks.delta.schema.layout import COMMITTED, DELETED, KEY_TEXT, PREFIX, UNCHANGED, VERSION, TableLayout

PARTIAL = PREFIX + "partial"
"""Source-side only: the row lacks columns whose stored values must stay."""


def keep_flag(number: int) -> str:
    """Source-side only: the name of the flag that says whether the numbered kept column is absent from a row."""
    return f"{PREFIX}keep_{number}"


@dataclass(frozen=True, slots=True)
class TypedChanges:
    """Rows of `layout.arrow` plus PARTIAL and a flag for each of `kept`; at most one row per key."""

    layout: TableLayout
    rows: pa.Table
    keys: AnyArray
    """The key of each row as JSON, for the dead letters."""
    kept: tuple[str, ...]
    rejected: tuple[RejectedItem, ...]
    truncated: int
    lsn: int

    @property
    def partial(self) -> bool:
        """Whether any row lacks columns."""
        return bool(self.kept)

    def after_truncate(self, floor: int) -> "TypedChanges":
        """What is left to do in a table that has seen the truncate `floor`: nothing below it, nor that one again."""
        truncated = self.truncated if self.truncated > floor else 0
        young = pa.array(self.rows[VERSION].to_numpy() >= max(floor, truncated))
        return replace(self, rows=self.rows.filter(young), keys=self.keys.filter(young), truncated=truncated)

    def without(self, rows: npt.NDArray[np.bool_], reason: str) -> "TypedChanges":
        """The changes with these rows set aside."""
        if not rows.any():
            return self
        mask = pa.array(rows)
        items = rejected_items(self.layout, self.keys.filter(mask), self.rows[VERSION].filter(mask), reason)
        rest = pa.array(~rows)
        return replace(
            self,
            rows=self.rows.filter(rest),
            keys=self.keys.filter(rest),
            rejected=self.rejected + items,
        )

    def halves(self) -> tuple["TypedChanges", "TypedChanges"]:
        """The lower and the upper half by key, for a batch that touches too much at once."""
        order = sorted_places(self.rows, self.layout.key)
        half = self.rows.num_rows // 2
        return self._picked(order[:half]), self._picked(order[half:])

    def pieces(self, counted: npt.NDArray[np.bool_], most: int) -> tuple["TypedChanges", ...]:
        """Neighbours by key with at most so many of the counted rows each; none, if all of them may stay together."""
        total = int(counted.sum())
        if total <= most:
            return ()
        order = sorted_places(self.rows, self.layout.key)
        before = np.cumsum(counted[order.to_numpy()]) - 1
        starts = np.searchsorted(before, np.arange(0, total, most))
        cuts = [0, *starts[1:].tolist(), len(order)]
        return tuple(self._picked(order.slice(start, end - start)) for start, end in pairwise(cuts))

    def with_rejected(self, *parts: "TypedChanges") -> "TypedChanges":
        """These changes with what was set aside while their parts were written."""
        new = (item for part in parts for item in part.rejected[len(self.rejected) :])
        return replace(self, rejected=self.rejected + tuple(new))

    def _picked(self, places: AnyArray) -> "TypedChanges":
        return replace(self, rows=self.rows.take(places), keys=self.keys.take(places))


def rejected_items(layout: TableLayout, keys: AnyArray, versions: AnyArray, reason: str) -> tuple[RejectedItem, ...]:
    """One item per row, all with the same reason."""
    pairs = zip(keys.to_pylist(), versions.to_pylist(), strict=True)
    return tuple(RejectedItem(str(layout.table), key, version, reason) for key, version in pairs)


def changes(batch: Batch, layout: TableLayout) -> TypedChanges:
    """Type a batch; rows with a value that does not fit are set aside."""
    rows = batch.rows.combine_chunks()
    if pc.count_distinct(rows["key"]).as_py() != rows.num_rows:
        raise SinkError(
            f"table {layout.table}: a batch holds two changes of one key, so it was not folded. Nothing was written.",
            "This is a fault in Millrace: report it with the version and the log of this process.",
        )
    lsn = pc.max(rows["commit_lsn"]).as_py() or batch.truncated
    columns, misfits = _columns(layout, rows)
    kept, flags = _kept(layout, rows)
    deleted: AnyArray = pc.equal(_plain(rows["op"]), pa.scalar("d"))
    if layout.deletes is not None:
        columns, deleted = _softly_deleted(layout, columns, deleted)
        flags = {name: pc.and_not(flag, deleted) for name, flag in flags.items()}  # nothing is kept of what is gone
    table = pa.table(
        {
            **({KEY_TEXT: _plain(rows["key"])} if layout.by_text else {}),
            **columns,
            **{field.name: no_values(rows.num_rows, field.type) for field in (*layout.leftover, *layout.history)},
            VERSION: _plain(rows["version"]),
            DELETED: deleted,
            COMMITTED: _plain(rows["commit_ts"]),
            **flags,
        }
    )
    if layout.changelog:
        kept, table = (), as_log(table, rows)
    typed_rows = TypedChanges(layout, table, _plain(rows["key"]), kept, (), batch.truncated, lsn)
    return _without_misfits(typed_rows, misfits)


def _softly_deleted(
    layout: TableLayout, columns: Mapping[str, AnyArray], deleted: AnyArray
) -> tuple[dict[str, AnyArray], AnyArray]:
    """Rows that count as deleted, as deletes are: the key alone is left of them."""
    gone: AnyArray = pc.or_(deleted, pa.array(_counts_as_deleted(layout, columns)))
    key = {one.name for one in layout.placed if one.column.key}
    emptied = {
        name: values if name in key else pc.if_else(gone, pa.scalar(None, values.type), values)
        for name, values in columns.items()
    }
    return emptied, gone


def _counts_as_deleted(layout: TableLayout, columns: Mapping[str, AnyArray]) -> npt.NDArray[np.bool_]:
    if layout.deletes is None:
        return np.zeros(len(next(iter(columns.values()))), np.bool_)
    return layout.deletes.holds({one.column.name: columns[one.name] for one in layout.placed})


def as_log(table: pa.Table, rows: pa.Table) -> pa.Table:
    """For a changelog: a partial change is whole in itself, and names the columns that it did not bring."""
    names = [json.dumps(missing) if missing else None for missing in rows["unchanged"].to_pylist()]
    flags = np.zeros(rows.num_rows, np.bool_)
    table = table.set_column(table.column_names.index(UNCHANGED), UNCHANGED, pa.array(names, pa.string()))
    return table.set_column(table.column_names.index(PARTIAL), PARTIAL, pa.array(flags))


def expected(schema: TableSchema, layout: TableLayout, images: pa.Table) -> pa.Table:
    """The rows of these images (columns key, after) as `stored` gives them: named as in the source, by key.

    A value that does not fit is null here, while the store refused its row: verify must see the difference.
    """
    read, _ = _columns(layout, images.combine_chunks())
    live = pa.array(~_counts_as_deleted(layout, read))
    return in_source_order(schema, layout, pa.table(read).filter(live))


def in_source_order(schema: TableSchema, layout: TableLayout, rows: pa.Table) -> pa.Table:
    """`named_as_source`, ordered by key."""
    table = named_as_source(schema, layout, rows)
    if not table.num_rows:
        return table.combine_chunks()
    return sorted_by(table, [column.name for column in schema.key]).combine_chunks()


def named_as_source(schema: TableSchema, layout: TableLayout, rows: pa.Table) -> pa.Table:
    """Delta's columns under the source's names, in the source's column order.

    Floats are given as their shortest exact text: NaN would not equal itself, and -0 would equal 0.
    """
    names = {one.column.name: one.name for one in layout.placed}
    return pa.table({column.name: _comparable(rows[names[column.name]]) for column in schema.columns})


def sorted_by(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Rows in ascending order of these columns."""
    return rows.take(sorted_places(rows, names))


def sorted_places(rows: pa.Table, names: Sequence[str]) -> AnyArray:
    """The numbers of the rows, in ascending order of these columns."""
    order: list[tuple[str, Literal["ascending", "descending"]]] = [(name, "ascending") for name in names]
    return pc.sort_indices(rows, sort_keys=order)


def _comparable(column: AnyArray) -> AnyArray:
    return column.cast(pa.string()) if pa.types.is_floating(column.type) else column


def _columns(layout: TableLayout, rows: pa.Table) -> tuple[dict[str, AnyArray], dict[int, str]]:
    """Key columns are read from `key`: a key may be too large to be sent again, and a delete has nothing else."""
    types = {one.column: one.type for one in layout.placed}
    keys = typed({column: types[column] for column in types if column.key}, _plain(rows["key"]))
    others = typed({column: types[column] for column in types if not column.key}, _plain(rows["after"]))
    read = {**keys.columns, **others.columns}
    columns = {one.name: read[one.column.name] for one in layout.placed}
    return columns, {**others.misfits, **keys.misfits}


def _plain(column: AnyArray) -> AnyArray:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _without_misfits(rows: TypedChanges, misfits: Mapping[int, str]) -> TypedChanges:
    """Set misfits aside by reason, keeping row numbers valid while doing so."""
    if not misfits:
        return rows
    reasons = sorted(set(misfits.values()))
    numbers = np.full(rows.rows.num_rows, -1)
    numbers[list(misfits)] = [reasons.index(reason) for reason in misfits.values()]
    for number, reason in enumerate(reasons):
        rows = rows.without(numbers == number, reason)
        numbers = numbers[numbers != number]
    return rows


def _kept(layout: TableLayout, rows: pa.Table) -> tuple[tuple[str, ...], dict[str, AnyArray]]:
    """Columns that some row does not bring, each with its flags."""
    unchanged = _plain(rows["unchanged"])
    parents: AnyArray = pc.list_parent_indices(unchanged)
    owners = parents.to_numpy(zero_copy_only=False)
    missing: AnyArray = pc.list_flatten(unchanged)
    kept: list[str] = []
    flags: dict[str, AnyArray] = {}
    partial = np.zeros(rows.num_rows, np.bool_)
    for one in layout.placed:
        named: AnyArray = pc.equal(missing, pa.scalar(one.column.name))
        mine = owners[named.to_numpy(zero_copy_only=False)]
        if not len(mine) or one.column.key:
            continue
        flag = np.zeros(rows.num_rows, np.bool_)
        flag[mine] = True
        partial |= flag
        flags[keep_flag(len(kept))] = pa.array(flag)
        kept.append(one.name)
    return tuple(kept), {PARTIAL: pa.array(partial), **flags}

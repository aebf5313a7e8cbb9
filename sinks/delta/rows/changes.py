"""A folded batch as typed rows for Delta. Pure.

Rows with values that do not fit their column are rejected here, before anything is written.
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
from cdc.json_text.typed import no_values
from cdc.model import TableSchema
from cdc.ports import Batch
from sinks.delta.rows.images import typed
from sinks.delta.schema.layout import COMMITTED, DELETED, KEY_TEXT, PREFIX, UNCHANGED, VERSION, TableLayout

PARTIAL = PREFIX + "partial"
"""Not in the Delta table: the row lacks columns, and the stored values of these must stay."""


def keep_flag(number: int) -> str:
    """Not in the Delta table: the name of the flag that says whether a row lacks the numbered column of `kept`."""
    return f"{PREFIX}keep_{number}"


@dataclass(frozen=True, slots=True)
class TypedChanges:
    """Rows of `layout.arrow` plus PARTIAL and a flag for each of `kept`; at most one row per key.

    `kept` are the columns that some row lacks. An orphan is a partial row without a live stored row.
    """

    layout: TableLayout
    rows: pa.Table
    keys: AnyArray
    """The key of each row as JSON, for dead letters."""
    kept: tuple[str, ...]
    rejected: tuple[RejectedItem, ...]
    truncated: int
    lsn: int

    @property
    def partial(self) -> bool:
        """Whether any row lacks columns."""
        return bool(self.kept)

    def after_truncate(self, floor: int) -> "TypedChanges":
        """The changes that a table with the truncate `floor` still needs: none that is older, nor the same truncate."""
        truncated = self.truncated if self.truncated > floor else 0
        newer = pa.array(self.rows[VERSION].to_numpy() >= max(floor, truncated))
        return replace(self, rows=self.rows.filter(newer), keys=self.keys.filter(newer), truncated=truncated)

    def without(self, rows: npt.NDArray[np.bool_], reason: str) -> "TypedChanges":
        """The changes with these rows rejected."""
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
        order = sort_order(self.rows, self.layout.key)
        half = self.rows.num_rows // 2
        return self._picked(order[:half]), self._picked(order[half:])

    def pieces(self, counted: npt.NDArray[np.bool_], most: int) -> tuple["TypedChanges", ...]:
        """Parts in key order with at most `most` of the counted rows each; empty if no split is needed."""
        total = int(counted.sum())
        if total <= most:
            return ()
        order = sort_order(self.rows, self.layout.key)
        before = np.cumsum(counted[order.to_numpy()]) - 1
        starts = np.searchsorted(before, np.arange(0, total, most))
        cuts = [0, *starts[1:].tolist(), len(order)]
        return tuple(self._picked(order.slice(start, end - start)) for start, end in pairwise(cuts))

    def with_rejected(self, *parts: "TypedChanges") -> "TypedChanges":
        """These changes with the rows that were rejected while their parts were written."""
        new = (item for part in parts for item in part.rejected[len(self.rejected) :])
        return replace(self, rejected=self.rejected + tuple(new))

    def _picked(self, rows: AnyArray) -> "TypedChanges":
        return replace(self, rows=self.rows.take(rows), keys=self.keys.take(rows))


def rejected_items(layout: TableLayout, keys: AnyArray, versions: AnyArray, reason: str) -> tuple[RejectedItem, ...]:
    """One item per row, all with the same reason."""
    pairs = zip(keys.to_pylist(), versions.to_pylist(), strict=True)
    return tuple(RejectedItem(str(layout.table), key, version, reason) for key, version in pairs)


def changes(batch: Batch, layout: TableLayout) -> TypedChanges:
    """Type a batch; rows with a value that does not fit are rejected."""
    rows = batch.rows.combine_chunks()
    if pc.count_distinct(rows["key"]).as_py() != rows.num_rows:
        raise SinkError(
            f"table {layout.table}: a batch has two changes of one key, so it was not folded. Nothing was written.",
            "This is a fault in Millrace: report it with the version and the log of this process.",
        )
    lsn = pc.max(rows["commit_lsn"]).as_py() or batch.truncated
    columns, misfits = _columns(layout, rows)
    kept, flags = _kept(layout, rows)
    deleted: AnyArray = pc.equal(_one_chunk(rows["op"]), pa.scalar("d"))
    if layout.deletes is not None:
        columns, deleted = _softly_deleted(layout, columns, deleted)
        flags = {
            name: pc.and_not(flag, deleted) for name, flag in flags.items()
        }  # a deleted row keeps no stored values
    table = pa.table(
        {
            **({KEY_TEXT: _one_chunk(rows["key"])} if layout.by_text else {}),
            **columns,
            **{field.name: no_values(rows.num_rows, field.type) for field in (*layout.leftover, *layout.history)},
            VERSION: _one_chunk(rows["version"]),
            DELETED: deleted,
            COMMITTED: _one_chunk(rows["commit_ts"]),
            **flags,
        }
    )
    if layout.changelog:
        kept, table = (), _as_changelog(table, rows)
    typed_rows = TypedChanges(layout, table, _one_chunk(rows["key"]), kept, (), batch.truncated, lsn)
    return _without_misfits(typed_rows, misfits)


def _softly_deleted(
    layout: TableLayout, columns: Mapping[str, AnyArray], deleted: AnyArray
) -> tuple[dict[str, AnyArray], AnyArray]:
    """Turn rows that count as deleted into deletes, which have only their key."""
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
    return layout.deletes.matches({one.column.name: columns[one.name] for one in layout.placed})


def _as_changelog(table: pa.Table, rows: pa.Table) -> pa.Table:
    """For a changelog: a partial change is stored as it is, with the names of the columns that it lacks."""
    names = [json.dumps(missing) if missing else None for missing in rows["unchanged"].to_pylist()]
    flags = np.zeros(rows.num_rows, np.bool_)
    table = table.set_column(table.column_names.index(UNCHANGED), UNCHANGED, pa.array(names, pa.string()))
    return table.set_column(table.column_names.index(PARTIAL), PARTIAL, pa.array(flags))


def expected(schema: TableSchema, layout: TableLayout, images: pa.Table) -> pa.Table:
    """The rows of these images (columns key, after) as `DeltaSink.stored` gives them: source names, in key order.

    A value that does not fit is null here, while the sink rejected its row: `verify` must see the difference.
    """
    read, _ = _columns(layout, images.combine_chunks())
    live = pa.array(~_counts_as_deleted(layout, read))
    return in_source_order(schema, layout, pa.table(read).filter(live))


def in_source_order(schema: TableSchema, layout: TableLayout, rows: pa.Table) -> pa.Table:
    """`named_as_source`, in key order."""
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
    return rows.take(sort_order(rows, names))


def sort_order(rows: pa.Table, names: Sequence[str]) -> AnyArray:
    """The numbers of the rows, in ascending order of these columns."""
    order: list[tuple[str, Literal["ascending", "descending"]]] = [(name, "ascending") for name in names]
    return pc.sort_indices(rows, sort_keys=order)


def _comparable(column: AnyArray) -> AnyArray:
    return column.cast(pa.string()) if pa.types.is_floating(column.type) else column


def _columns(layout: TableLayout, rows: pa.Table) -> tuple[dict[str, AnyArray], dict[int, str]]:
    """Key columns are read from `key`: a delete has no other values, and an update may lack a large key column."""
    types = {one.column: one.type for one in layout.placed}
    keys = typed({column: types[column] for column in types if column.key}, _one_chunk(rows["key"]))
    others = typed({column: types[column] for column in types if not column.key}, _one_chunk(rows["after"]))
    read = {**keys.columns, **others.columns}
    columns = {one.name: read[one.column.name] for one in layout.placed}
    return columns, {**others.misfits, **keys.misfits}


def _one_chunk(column: AnyArray) -> AnyArray:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _without_misfits(rows: TypedChanges, misfits: Mapping[int, str]) -> TypedChanges:
    """Reject the misfits, reason by reason; row numbers shift with each."""
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
    """The columns that some row lacks, each with its flags."""
    unchanged = _one_chunk(rows["unchanged"])
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

"""Changes of the log as rows of a DataFrame, a record batch at a time. Pure.

An update whose old row is in the log becomes two rows, `update_preimage` and `update_postimage`; every other change
becomes one. NULL in a column that MISSING names means that the log does not say the value.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools
from cdc.errors import ChangeRefused
from cdc.model import Column, Lsn, Op, format_lsn
from pyspark_millrace.columns import MISSING, TableColumns
from pyspark_millrace.options import Mode, Preimages, RowRules, Truncates
from sinks.delta.rows.images import typed

_READ_ORDINAL, _REFILL_ORDINAL = -1, -2
"""Rows that were read belong to no transaction, nor does the truncate before them, which comes first."""
_CHANGE_TYPES = {
    Op.INSERT.value: "insert",
    Op.READ.value: "insert",
    Op.UPDATE.value: "update_postimage",
    Op.DELETE.value: "delete",
    Op.TRUNCATE.value: "truncate",
}
_PREIMAGE = "update_preimage"


@dataclass(frozen=True, slots=True)
class RowReader:
    """Turns changes of one table into rows."""

    columns: TableColumns
    rules: RowRules

    def rows(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of these changes, in their order. Raises ChangeRefused for what the rules do not allow."""
        changes = self._allowed(changes)
        expanded = _expanded(changes, self._preimages(changes))
        values, missing = self._values(expanded)
        schema = self.columns.arrow
        names = _named(missing, [column.name for column in self.columns.read]).cast(schema.field(MISSING).type)
        return pa.RecordBatch.from_arrays([*values, *_described(expanded), names], schema=schema)

    def _allowed(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """Without messages and what the rules skip."""
        truncates, removals = _having(changes, Op.TRUNCATE), _having(changes, Op.REMOVE)
        rule = self.rules.truncates
        if rule is Truncates.FAIL:
            self._refuse(changes, truncates, "was truncated", "Set the option 'truncates' to emit or skip.")
        if rule is not Truncates.SKIP:
            self._refuse(
                changes,
                removals,
                "lost the rows of a partition, which no row can say",
                "Set the option 'truncates' to skip, or source.partitions.removed to keep.",
            )
        skipped = _having(changes, Op.MESSAGE) | removals
        skipped |= truncates if rule is Truncates.SKIP else False
        return changes.filter(pa.array(~skipped)) if skipped.any() else changes

    def _preimages(self, changes: pa.RecordBatch) -> Bools:
        """The updates that get a row for the state before."""
        updates, known = _having(changes, Op.UPDATE), _flags(changes.column("before").is_valid())
        if self.rules.preimages is Preimages.REQUIRED:
            lacking = (updates | _having(changes, Op.DELETE)) & ~known
            remedy = f"alter table {self.columns.schema.table} replica identity full; or the option 'preimages'."
            self._refuse(changes, lacking, "has a change without the row before it", remedy)
        return updates & known & (self.rules.preimages is not Preimages.NONE)

    def _values(self, rows: "_Rows") -> tuple[list[AnyArray], Bools]:
        """The table's columns, and a table of flags, row by column: where the value is not known."""
        read = self.columns.read
        found = typed(self.columns.types, rows.images)
        keys = typed({column: self.columns.types[column] for column in read if column.key}, rows.keys)
        missing = np.stack([found.absent[column.name] for column in read], axis=1)
        values = []
        for at, column in enumerate(read):
            value = found.columns[column.name]
            if column.key:  # an update may lack a large key column, and a delete may have nothing but its key
                value = pc.coalesce(value, keys.columns[column.name])
                missing[:, at] &= keys.absent[column.name]
            values.append(value)
        if misfits := sorted({*found.misfits, *keys.misfits}):
            self._note_misfits(rows, misfits, {**keys.misfits, **found.misfits}, missing)
        return values, missing

    def _note_misfits(self, rows: "_Rows", misfits: list[int], reasons: Mapping[int, str], missing: Bools) -> None:
        if self.rules.mode is Mode.FAILFAST:
            first = misfits[0]
            what = f"has a value that cannot be read: {reasons[first]}"
            remedy = "Set the option 'mode' to PERMISSIVE, or leave the column out with 'columns'."
            self._refuse(rows.changes, np.arange(rows.changes.num_rows) == first, what, remedy)
        places = pa.array(misfits)
        for at, column in enumerate(self.columns.read):
            unfit = self._unfit(column, rows.images.take(places), rows.keys.take(places))
            missing[np.array(misfits)[unfit], at] = True

    def _unfit(self, column: Column, images: AnyArray, keys: AnyArray) -> list[int]:
        """Which of these rows have a value of one column that does not fit."""
        types = {column: self.columns.types[column]}
        return sorted({*typed(types, images).misfits, *(typed(types, keys).misfits if column.key else ())})

    def _refuse(self, changes: pa.RecordBatch, rows: Bools, what: str, remedy: str) -> None:
        found = np.flatnonzero(rows)
        if len(found):
            lsn = Lsn(changes.column("commit_lsn")[int(found[0])].as_py())
            raise ChangeRefused(f"Table {self.columns.schema.table}, commit {format_lsn(lsn)}: it {what}.", remedy)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The change of each row, and the image that the row shows."""

    changes: pa.RecordBatch
    preimages: Bools
    images: AnyArray

    @property
    def keys(self) -> AnyArray:
        return self.changes.column("key")


def _expanded(changes: pa.RecordBatch, preimages: Bools) -> _Rows:
    """One row for each change, and before it another one for each preimage."""
    source: AnyArray = pa.array(np.repeat(np.arange(changes.num_rows), 1 + preimages))
    first = np.zeros(len(source), np.bool_)
    first[np.flatnonzero(preimages) + np.arange(int(preimages.sum()))] = True
    rows = changes.take(source)
    after, before = rows.column("after"), rows.column("before")
    return _Rows(rows, first, pc.if_else(pa.array(first), before, pc.coalesce(after, before)))


def _described(rows: _Rows) -> list[AnyArray]:
    """The columns that describe the change, without MISSING."""
    changes = rows.changes
    number: AnyArray = pc.index_in(changes.column("op"), value_set=pa.array(list(_CHANGE_TYPES), pa.string()))
    kinds: AnyArray = pa.array(_CHANGE_TYPES.values(), pa.string()).take(number)
    kinds = pc.if_else(pa.array(rows.preimages), _PREIMAGE, kinds)
    streamed = changes.column("xid").to_numpy() > 0
    unstreamed = np.where(_having(changes, Op.TRUNCATE), _REFILL_ORDINAL, _READ_ORDINAL)
    ordinals = np.where(streamed, changes.column("ordinal").to_numpy(), unstreamed)
    times = changes.column("commit_ts")
    return [kinds, changes.column("commit_lsn"), times, changes.column("version"), pa.array(ordinals, pa.int64())]


def _named(flags: Bools, names: list[str]) -> AnyArray:
    """For each row the names of its flagged columns."""
    at: AnyArray = pa.array(np.nonzero(flags)[1])
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(flags.sum(axis=1))])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(names, pa.string()).take(at))


def _having(changes: pa.RecordBatch, op: Op) -> Bools:
    return _flags(pc.equal(changes.column("op"), pa.scalar(op.value)))


def _flags(array: AnyArray) -> Bools:
    flags: Bools = array.to_numpy(zero_copy_only=False)
    return flags

"""A removed range of keys as deletes of the stored rows in it.

Every form of table (rows, history, changelog) then applies them like other deletes and keeps its tombstones.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.arrays import AnyArray
from cdc.json_text.typed import no_values
from cdc.key_range import Level, Removal
from sinks.delta.changelog import newest
from sinks.delta.rows.changes import PARTIAL, TypedChanges
from sinks.delta.schema.layout import COMMITTED, DELETED, VERSION, TableLayout
from sinks.delta.write.region import quoted

AT_ONCE = 500_000
"""Deletes in one commit: they are in memory together with the files that the merge rewrites."""


def deletes(table: DeltaTable, layout: TableLayout, removal: Removal) -> Iterator[TypedChanges]:
    """Deletes of every live row of the range that is older than the removal, AT_ONCE at a time."""
    gone = _keys_of_removed(table, layout, removal)
    for start in range(0, gone.num_rows, AT_ONCE):
        yield _as_deletes(gone.slice(start, AT_ONCE).combine_chunks(), layout, removal)


def _keys_of_removed(table: DeltaTable, layout: TableLayout, removal: Removal) -> pa.Table:
    """The key columns of the live rows that the removal deletes; the table is read in pieces."""
    own = [*layout.key, *(one.name for one in layout.placed if one.column.key)]
    names = [name for name in dict.fromkeys(own) if name != VERSION]
    pieces: Iterable[pa.RecordBatch]
    if layout.changelog:
        pieces = newest(table, layout).to_batches()
    else:
        condition = " AND ".join(
            [f"NOT {DELETED}", f"{VERSION} < {removal.version}", *_file_conditions(layout, removal)]
        )
        pieces = pa.RecordBatchReader.from_stream(table.scan(columns=[*names, VERSION], predicate=condition))
    schema = pa.schema([layout.arrow.field(name) for name in (*names, VERSION)])
    found = [schema.empty_table()]
    for piece in pieces:
        rows = pa.Table.from_batches([piece]).select(schema.names).cast(schema)
        found.append(rows.filter(pa.array(is_removed(rows, layout, removal))))
    return pa.concat_tables(found).select(names)


def is_removed(rows: pa.Table, layout: TableLayout, removal: Removal) -> npt.NDArray[np.bool_]:
    """Which of these rows the removal deletes; they need the layout's key columns and versions."""
    names = {one.column.name: one.name for one in layout.placed}
    values = {name: rows[names[name]].combine_chunks() for name in removal.range.columns}
    older: AnyArray = pc.less(rows[VERSION], pa.scalar(removal.version, pa.int64()))
    flags: npt.NDArray[np.bool_] = removal.range.contains(values) & older.to_numpy()
    return flags


def _file_conditions(layout: TableLayout, removal: Removal) -> Iterator[str]:
    """Conditions by which Delta skips files without a row of the range."""
    placed = {one.column.name: one for one in layout.placed}
    for level in removal.range.levels:
        one = placed[level.columns[0]]
        for sign, bound in _bounds(level):
            if pa.types.is_integer(one.type) and "." not in bound:
                yield f"{quoted(one.name)} {sign} {bound}"
            elif pa.types.is_date(one.type):
                yield f"{quoted(one.name)} {sign} DATE '{bound}'"


def _bounds(level: Level) -> Iterator[tuple[str, str]]:
    for sign, bounds in ((">=", level.lower), ("<=", level.upper)):
        if bounds and isinstance(bounds[0], str):
            yield sign, bounds[0]


def _as_deletes(keys: pa.Table, layout: TableLayout, removal: Removal) -> TypedChanges:
    count = keys.num_rows
    ours: dict[str, AnyArray] = {
        VERSION: pa.array(np.full(count, removal.version, np.int64)),
        DELETED: pa.array(np.ones(count, np.bool_)),
        COMMITTED: pa.repeat(pa.scalar(removal.commit_ts, layout.arrow.field(COMMITTED).type), count),
    }
    columns: dict[str, AnyArray] = {
        field.name: ours[field.name]
        if field.name in ours
        else keys[field.name].combine_chunks()
        if field.name in keys.column_names
        else no_values(count, field.type)
        for field in layout.arrow
    }
    rows = pa.table({**columns, PARTIAL: pa.array(np.zeros(count, np.bool_))})
    return TypedChanges(layout, rows, pa.nulls(count, pa.string()), (), (), 0, removal.commit_lsn)

"""A delta: the changes of a table of rows between two positions of the log, as an Arrow table. Pure.

Each row of a delta is a row that is no longer there (`_sign` -1) or that is there now (`_sign` 1), and `_id` identifies
it in its table. A changed row is two rows of the delta, the old one first: rows with one id are in order.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools, Ints

ID, SIGN = "_id", "_sign"
_OWN = [pa.field(ID, pa.string()), pa.field(SIGN, pa.int8())]


def delta_schema(columns: pa.Schema) -> pa.Schema:
    """The columns of a delta whose rows have these columns."""
    return pa.schema([*_OWN, *columns])


def data_names(delta: pa.Table) -> list[str]:
    """The columns of the rows themselves."""
    return [name for name in delta.column_names if name not in (ID, SIGN)]


def signs(delta: pa.Table) -> npt.NDArray[np.int8]:
    """The signs as numbers."""
    found: npt.NDArray[np.int8] = delta.column(SIGN).to_numpy()
    return found


def signed(rows: pa.Table, sign: npt.NDArray[np.int8]) -> pa.Table:
    """Rows, identified by their column ID, as a delta with these signs."""
    own: list[AnyArray] = [rows.column(ID), pa.array(sign, pa.int8())]
    data = rows.drop_columns([ID])
    return pa.Table.from_arrays([*own, *data.columns], schema=delta_schema(data.schema))


def codes(column: AnyArray) -> Ints:
    """Equal values have equal numbers, from 0; null is a value."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    coded: AnyArray = array.dictionary_encode(null_encoding="encode")
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    found: Ints = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def union(deltas: Sequence[pa.Table]) -> pa.Table:
    """Deltas one after the other; all have the same columns."""
    return deltas[0] if len(deltas) == 1 else pa.concat_tables(deltas).combine_chunks()


def net(delta: pa.Table) -> pa.Table:
    """At most one old and one new row for each id; nothing for a row that is what it was."""
    count = delta.num_rows
    if not count:
        return delta
    group = codes(delta.column(ID))
    order = np.argsort(group, kind="stable")
    firsts = np.flatnonzero(np.diff(group[order], prepend=-1))
    lasts = np.append(firsts[1:], count) - 1
    sign = signs(delta)
    old, new = order[firsts], order[lasts]
    had, has = sign[old] < 0, sign[new] > 0
    same = had & has
    same[same] = ~differing(delta, old[same], new[same])
    had, has = had & ~same, has & ~same
    # The old row directly before the new one: rows with one id stay in order.
    chosen = np.stack([old, new], axis=1).ravel()[np.stack([had, has], axis=1).ravel()]
    return delta.take(chosen)


def differing(rows: pa.Table, left: Ints, right: Ints) -> Bools:
    """For each pair of rows, whether any column of the data differs."""
    found: Bools = np.zeros(len(left), np.bool_)
    if not len(left):
        return found
    for name in data_names(rows):
        column: AnyArray = rows.column(name).combine_chunks()
        found |= ~equal(column.take(pa.array(left)), column.take(pa.array(right)))
    return found


def equal(left: AnyArray, right: AnyArray) -> Bools:
    """Whether values are the same; null is null. Floats are compared by their bits: 0 and -0 have other texts, and
    NaN is what it was."""
    if pa.types.is_floating(left.type):
        bits = pa.int64() if left.type == pa.float64() else pa.int32()
        left, right = left.view(bits), right.view(bits)
    same: AnyArray = pc.fill_null(pc.equal(left, right), pa.scalar(False))
    nulls: AnyArray = pc.and_(left.is_null(), right.is_null())
    found: Bools = same.to_numpy(zero_copy_only=False) | nulls.to_numpy(zero_copy_only=False)
    return found

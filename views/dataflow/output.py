"""The rows of a view as they were emitted, and the changes that follow from a delta. Pure but for the table's state."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.model import LOG_SCHEMA, TableId
from views.dataflow.delta import AT, ID, SIGN, delta_schema, net
from views.state.table import StateTable

ROW = "_json"
"""The row as a JSON object; `_id` is its key as a JSON object."""
OUTPUT = pa.schema([(ROW, pa.string())])


class Output:
    """A view's rows by key."""

    def __init__(self, view: TableId) -> None:
        self.view = view
        self.rows = StateTable(pa.schema([(ID, pa.string()), (AT, pa.int64()), *OUTPUT]))

    @property
    def tables(self) -> dict[str, StateTable]:
        """The state."""
        return {"rows": self.rows}

    def step(self, delta: pa.Table) -> pa.Table:
        """The changes of the view, rows of LOG_SCHEMA, one for each key. The state has them afterwards."""
        delta = net(delta)
        self.rows.put(delta.column(ID), delta.column(ID), delta.column(SIGN).to_numpy() > 0, delta)
        return changes(self.view, delta)

    def all_rows(self) -> Iterator[pa.Table]:
        """Every row as a change of LOG_SCHEMA, in pieces: what a store that has nothing yet needs."""
        for rows in self.rows.scan():
            signs = pa.array(np.ones(rows.num_rows, np.int8))
            delta = pa.table([rows.column(ID), signs, rows.column(AT), rows.column(ROW)], delta_schema(OUTPUT))
            yield changes(self.view, delta, snapshot=True)


def changes(view: TableId, delta: pa.Table, *, snapshot: bool = False) -> pa.Table:
    """A net delta as rows of LOG_SCHEMA, ordered by commit; `commit_ts` is filled in by the caller.

    An old row directly before the new one of its key is an update.
    """
    if not delta.num_rows:
        return LOG_SCHEMA.empty_table()
    ids = delta.column(ID).combine_chunks()
    sign = delta.column(SIGN).to_numpy()
    count = len(sign)
    updated = np.zeros(count, np.bool_)
    same = pc.equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    updated[1:] = same & (sign[1:] > 0) & (sign[:-1] < 0)
    former = np.append(updated[1:], False)
    ops = np.where(updated, "u", np.where(sign > 0, "r" if snapshot else "c", "d"))
    rows = delta.column(ROW).combine_chunks()
    nothing = pa.scalar(None, pa.string())
    previous = rows.take(pa.array(np.maximum(np.arange(count) - 1, 0)))
    before = pc.if_else(pa.array(updated), previous, pc.if_else(pa.array(sign < 0), rows, nothing))
    after = pc.if_else(pa.array(sign > 0), rows, nothing)
    found = _log_rows(view, pa.array(ops.tolist(), pa.string()), ids, after, before, delta.column(AT))
    kept = found.filter(pa.array(~former))
    return kept.sort_by([("commit_lsn", "ascending")]).set_column(
        LOG_SCHEMA.get_field_index("ordinal"), LOG_SCHEMA.field("ordinal"), pa.array(np.arange(kept.num_rows))
    )


def _log_rows(view: TableId, ops: AnyArray, ids: AnyArray, after: AnyArray, before: AnyArray, at: AnyArray) -> pa.Table:
    count = len(ops)
    zeros = pa.array(np.zeros(count, np.int64))
    columns = {
        "table": pa.array([str(view)]).take(zeros),
        "op": ops,
        "key": ids,
        "after": after,
        "before": before,
        "unchanged": pa.nulls(count, LOG_SCHEMA.field("unchanged").type),
        "version": at,
        "commit_lsn": at,
        "ordinal": zeros,
        "xid": zeros,
        "commit_ts": zeros.cast(LOG_SCHEMA.field("commit_ts").type),
        "schema_id": pa.array(np.zeros(count, np.int32)),
    }
    return pa.table([columns[name] for name in LOG_SCHEMA.names], LOG_SCHEMA)

"""The rows of a view as they were emitted, and the changes that follow from a delta. Pure but for the table's state."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.errors import ViewError
from cdc.model import LOG_SCHEMA, TableId
from views.dataflow.delta import ID, SIGN, net, signed, signs
from views.state.key_hash import hashes
from views.state.table import StateTable

ROW = "_json"
"""The row as a JSON object; `_id` is its key as a JSON object."""
OUTPUT = pa.schema([(ROW, pa.string())])


class Output:
    """A view's rows by key."""

    def __init__(self, view: TableId) -> None:
        self.view = view
        self.rows = StateTable(pa.schema([(ID, pa.string()), *OUTPUT]))
        self._count: int | None = None

    @property
    def tables(self) -> dict[str, StateTable]:
        """The state."""
        return {"rows": self.rows}

    def step(self, delta: pa.Table) -> pa.Table:
        """The changes of the view, for `changes`. The state has them afterwards."""
        delta = net(delta)
        self._require_new_keys(delta)
        if self._count is not None:
            self._count += int(signs(delta).sum())
        self.rows.put(delta.column(ID), delta.column(ID), signs(delta) > 0, delta)
        return delta

    @property
    def count(self) -> int:
        """How many rows there are."""
        if self._count is None:
            self._count = sum(rows.num_rows for rows in self.rows.scan())
        return self._count

    def _require_new_keys(self, delta: pa.Table) -> None:
        """Raise ViewError if a row is added whose key another row has: a declared key may be wrong."""
        ids: AnyArray = delta.column(ID).combine_chunks()
        added = signs(delta) > 0
        replaced: AnyArray = pc.is_in(ids, value_set=ids.filter(pa.array(~added)))
        new = ids.filter(pa.array(added & ~replaced.to_numpy(zero_copy_only=False)))
        stored = self.rows.lookup(hashes(new)).column(ID)
        if pc.any(pc.is_in(stored, value_set=new)).as_py():
            raise two_rows(self.view.name)

    def content(self) -> Iterator[pa.Table]:
        """Every row as a delta, in pieces."""
        for rows in self.rows.scan():
            yield signed(rows.select([ID, ROW]), np.ones(rows.num_rows, np.int8))


def two_rows(view: str) -> ViewError:
    """Rows cannot be told apart."""
    return ViewError(
        f"View {view} has two rows with the same key.", "Name more columns in its `key`, so that each row has its own."
    )


@dataclass(frozen=True, slots=True)
class Moment:
    """What the changes of a batch reflect: everything up to this commit."""

    lsn: int
    committed: datetime


def changes(view: TableId, delta: pa.Table, moment: Moment, *, read: bool = False) -> pa.Table:
    """A net delta as rows of LOG_SCHEMA. An old row directly before the new one of its key is an update.

    `read`: rows that are there have op `r`, as those of a snapshot.
    """
    if not delta.num_rows:
        return LOG_SCHEMA.empty_table()
    ids = delta.column(ID).combine_chunks()
    sign = delta.column(SIGN).to_numpy()
    count = len(sign)
    updated = np.zeros(count, np.bool_)
    same = pc.equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    updated[1:] = same & (sign[1:] > 0) & (sign[:-1] < 0)
    kept = ~np.append(updated[1:], False)
    ops = np.where(updated, "u", np.where(sign > 0, "r" if read else "c", "d"))
    rows: AnyArray = delta.column(ROW).combine_chunks()
    nothing = pa.scalar(None, pa.string())
    previous = rows.take(pa.array(np.maximum(np.arange(count) - 1, 0)))
    before = pc.if_else(pa.array(updated), previous, pc.if_else(pa.array(sign < 0), rows, nothing))
    after = pc.if_else(pa.array(sign > 0), rows, nothing)
    images = pa.table({"op": pa.array(ops.tolist(), pa.string()), "key": ids, "after": after, "before": before})
    return _log_rows(view, images.filter(pa.array(kept)), moment)


def _log_rows(view: TableId, images: pa.Table, moment: Moment) -> pa.Table:
    count = images.num_rows
    lsns = pa.array(np.full(count, moment.lsn, np.int64))
    columns: dict[str, AnyArray] = {
        "table": pa.repeat(str(view), count),
        "unchanged": pa.nulls(count, LOG_SCHEMA.field("unchanged").type),
        "version": lsns,
        "commit_lsn": lsns,
        "ordinal": pa.array(np.arange(count)),
        "xid": pa.array(np.zeros(count, np.int64)),
        "commit_ts": pa.repeat(pa.scalar(moment.committed, LOG_SCHEMA.field("commit_ts").type), count),
        "schema_id": pa.array(np.zeros(count, np.int32)),
    }
    columns |= {name: images.column(name) for name in images.column_names}
    return pa.Table.from_arrays([columns[name] for name in LOG_SCHEMA.names], schema=LOG_SCHEMA)

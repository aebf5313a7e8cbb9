"""The rows of each key as one JSON array: the children of a parent in a document."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from views.dataflow.delta import ID, SIGN, delta_schema, net, signed
from views.state.key_hash import hashes
from views.state.table import StateTable

KEY, ORDER, TEXT, ITEM, LIST = "_parent", "_order", "_order_text", "_item", "_list"
"""The columns of the input: the parent's key, what orders the items (a number, then a text, then the id), the item's
JSON text; and the column of the result."""
INPUT: Mapping[str, pa.DataType] = {KEY: pa.string(), ORDER: pa.float64(), TEXT: pa.string(), ITEM: pa.string()}
OUTPUT = pa.schema([(KEY, pa.string()), (LIST, pa.string())])


class Collect:
    """Keeps the items of each key. A key without items has no row in the result."""

    def __init__(self) -> None:
        self.items = StateTable(pa.schema({ID: pa.string(), **INPUT}))

    @property
    def tables(self) -> dict[str, StateTable]:
        """The state."""
        return {"items": self.items}

    def step(self, delta: pa.Table) -> pa.Table:
        """The net delta of the lists. Only the lists of the delta's keys are looked up."""
        known = delta.filter(delta.column(KEY).is_valid())
        if not known.num_rows:
            return delta_schema(OUTPUT).empty_table()
        keys = pc.unique(known.column(KEY).combine_chunks())
        wanted = hashes(keys)
        before = _lists(self.items.lookup(wanted), keys)
        self.items.put(known.column(KEY), known.column(ID), known.column(SIGN).to_numpy() > 0, known)
        after = _lists(self.items.lookup(wanted), keys)
        return net(pa.concat_tables([_rows(keys, before, -1), _rows(keys, after, 1)]))


def _rows(keys: AnyArray, lists: AnyArray, sign: int) -> pa.Table:
    rows = signed(pa.table({ID: keys, KEY: keys, LIST: lists}), np.full(len(keys), sign, np.int8))
    return rows.filter(lists.is_valid())


def _lists(items: pa.Table, keys: AnyArray) -> AnyArray:
    """The array of each key's items, ordered; null for a key without items."""
    owner = pc.index_in(items.column(KEY), value_set=keys)
    owner = owner.combine_chunks() if isinstance(owner, pa.ChunkedArray) else owner
    rows = items.select([ORDER, TEXT, ID, ITEM]).append_column("owner", owner).filter(owner.is_valid())
    rows = rows.sort_by(
        [("owner", "ascending"), (ORDER, "ascending"), (TEXT, "ascending"), (ID, "ascending")]
    ).combine_chunks()
    counts = np.bincount(rows.column("owner").to_numpy(), minlength=len(keys))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    texts: AnyArray = rows.column(ITEM).combine_chunks()
    each: AnyArray = pa.array(offsets)
    joined: AnyArray = pc.binary_join(pa.ListArray.from_arrays(each, texts), ",")
    framed: AnyArray = pc.binary_join_element_wise("[", joined, "]", "")
    return pc.if_else(pa.array(counts > 0), framed, pa.scalar(None, pa.string()))

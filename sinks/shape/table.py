"""A table as one sink stores it: batches, keys, ranges and expected rows, from those of the source. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.errors import RejectedItem
from cdc.json_text.columns import members
from cdc.key_range import KeyRange, Removal
from cdc.ports import Batch
from sinks.fold.spark import FOLDED
from sinks.rows.images import columns
from sinks.rows.stored_images import json_objects
from sinks.shape.columns import ShapedColumns
from sinks.shape.images import shaped_images


@dataclass(frozen=True, slots=True)
class ShapedBatch:
    """A batch for the store, and the changes of the source that have no values in it."""

    batch: Batch
    rejected: tuple[RejectedItem, ...]
    keys: AnyArray
    """The source's keys of the batch's rows."""

    def of_source(self, items: Iterable[RejectedItem]) -> list[RejectedItem]:
        """What the store rejects, with the keys of the source."""
        found = list(items)
        if not found or self.keys.equals(_one_chunk(self.batch.rows["key"])):
            return found
        known = dict(zip(self.batch.rows["key"].to_pylist(), self.keys.to_pylist(), strict=True))
        return [replace(item, key=known.get(item.key, item.key)) for item in found]


@dataclass(frozen=True, slots=True)
class ShapedTable:
    """One schema of one table in one sink."""

    columns: ShapedColumns
    secret: bytes

    def batch(self, batch: Batch) -> ShapedBatch:
        """The batch as the store gets it: rows that do not meet the filter are deletes."""
        rows = batch.rows.combine_chunks()
        is_delete: AnyArray = pc.equal(_one_chunk(rows["op"]), pa.scalar("d"))
        is_change: AnyArray = pc.invert(is_delete)
        changed, deleted = rows.filter(is_change), rows.filter(is_delete)
        unchanged = _one_chunk(changed["unchanged"])
        partial = pc.any(pc.greater(pc.list_value_length(unchanged), pa.scalar(0))).as_py()
        images = shaped_images(self.columns, _one_chunk(changed["after"]), unchanged if partial else None, self.secret)
        gone = pa.array(images.gone)
        values = {
            "op": pc.if_else(gone, "d", "u"),
            "after": pc.if_else(gone, pa.scalar(None, pa.string()), images.after),
            "unchanged": pc.if_else(gone, pa.scalar(None, pa.list_(pa.string())), images.unchanged),
        }
        for name, column in values.items():
            changed = changed.set_column(changed.column_names.index(name), FOLDED.field(name), column)
        accepted = np.ones(changed.num_rows, np.bool_)
        accepted[list(images.refused)] = False
        rejected = self._rejected(changed, images.refused)
        stored = pa.concat_tables([changed.filter(pa.array(accepted)), deleted]).combine_chunks()
        keys = _one_chunk(stored["key"])
        stored = stored.set_column(stored.column_names.index("key"), FOLDED.field("key"), self.keys(keys))
        removed = tuple(map(self._removal, batch.removed))
        return ShapedBatch(Batch(self.columns.schema, stored, batch.truncated, removed), rejected, keys)

    def _rejected(self, rows: pa.Table, reasons: dict[int, str]) -> tuple[RejectedItem, ...]:
        picked = rows.take(pa.array(list(reasons), pa.int64()))
        facts = zip(*columns(picked, "table", "key", "version"), reasons.values(), strict=True)
        return tuple(RejectedItem(*fact) for fact in facts)

    def expected(self, images: pa.Table) -> pa.Table:
        """Images of the source (key, after) as images of the rows that the store should have."""
        keys, after = (_one_chunk(images[name]) for name in ("key", "after"))
        shaped = shaped_images(self.columns, after, None, self.secret)
        kept = pa.array(~shaped.gone)
        return pa.table({"key": self.keys(keys).filter(kept), "after": shaped.after.filter(kept)})

    def keys(self, keys: AnyArray) -> AnyArray:
        """Keys of the source under the names of the store."""
        renamed = self.columns.renamed_key
        if not renamed or not len(keys):
            return keys
        raw = {renamed.get(name, name): column.json() for name, column in members(keys).items()}
        return json_objects(len(keys), {name: cell.cast(pa.string()).fill_null("null") for name, cell in raw.items()})

    def _removal(self, removal: Removal) -> Removal:
        renamed = self.columns.renamed_key
        if not renamed:
            return removal
        levels = (
            replace(level, columns=tuple(renamed.get(name, name) for name in level.columns))
            for level in removal.range.levels
        )
        return replace(removal, range=KeyRange(tuple(levels)))


def _one_chunk(column: AnyArray) -> AnyArray:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

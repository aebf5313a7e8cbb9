"""Looks up one key in a Delta table, by its typed key columns."""

import pyarrow as pa
import pyarrow.compute as pc

from cdc.model import TableSchema
from cdc.ports import Batch
from sinks.delta.rows.changes import changes
from sinks.delta.schema.layout import DELETED, VERSION, TableLayout
from sinks.delta.store import DeltaStore
from sinks.delta.write.region import quoted
from sinks.fold.spark import FOLDED
from sinks.rows.stored_key import StoredKey


def read_key(store: DeltaStore, layout: TableLayout, schema: TableSchema, key: str) -> StoredKey:
    """The newest row of a key; of a history or a changelog, its newest version.

    Integers and texts in the key let Delta skip files; without either, the key columns are read completely.
    """
    if not store.exists():
        return StoredKey("absent", 0, store.uri)
    wanted = _typed(layout, schema, key)
    if wanted is None:
        return StoredKey("absent", 0, store.uri)
    names = [name for name in layout.key if name != VERSION]
    condition = " AND ".join(filter(None, (_condition(name, wanted[name]) for name in names)))
    rows = store.read(layout, [*names, VERSION, DELETED], condition)
    for name in names:
        rows = rows.filter(pc.equal(rows[name], wanted[name]))
    if not rows.num_rows:
        return StoredKey("absent", 0, store.uri)
    newest = rows.sort_by([(VERSION, "descending")]).slice(0, 1).to_pylist()[0]
    return StoredKey("deleted" if newest[DELETED] else "there", int(newest[VERSION]), store.uri)


def _typed(layout: TableLayout, schema: TableSchema, key: str) -> dict[str, "pa.Scalar[pa.DataType]"] | None:
    """The key's values in the types of the table; None if they do not fit."""
    row = {"table": str(schema.table), "op": "d", "key": key, "version": 1, "commit_lsn": 1, "schema_id": schema.id}
    empty = {field.name: None for field in FOLDED}
    rows = pa.Table.from_pylist([{**empty, **row, "commit_ts": 0, "unchanged": []}], schema=FOLDED)
    typed = changes(Batch(schema, rows), layout).rows
    values = {name: typed[name][0] for name in layout.key if typed.num_rows}
    return values if values and all(value.is_valid for value in values.values()) else None


def _condition(name: str, value: "pa.Scalar[pa.DataType]") -> str:
    if pa.types.is_integer(value.type):
        return f"{quoted(name)} = {value.as_py()}"
    if pa.types.is_string(value.type):
        text = str(value.as_py()).replace("'", "''")
        return f"{quoted(name)} = '{text}'"
    return ""

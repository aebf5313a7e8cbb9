"""A shape of the tables of `tests.scenes.histories`, and what a plain reader makes of it.

Nothing here uses the code under test: the filter and the columns are computed again by Python.
"""

import json
from collections.abc import Mapping

from cdc.config.settings import SinkSettings, TableShape
from cdc.errors import Rejected
from cdc.model import TableId
from cdc.ports import Batch, Sink
from sinks.apply.dead_letter_rows import batch_of, rows_of
from sinks.memory import MemorySettings
from sinks.rows.images import STORED_ROW_MISSING
from tests.scenes.histories import raw, text

SHAPE = TableShape(
    where="good and left(big, 1) <> 'a'",
    rename={"doc": "document"},
    drop=("ratio",),
    mask={"at": "mask"},
    compute={
        "size": "length(big)",
        "heading": "coalesce(label, 'none') || left(big, 1)",
        "copied": "big",
        "kind": "'item'",
    },
)
"""The filter, `heading` and `size` read `big`, which the server leaves out where it did not change."""


def shaped_settings(*tables: TableId, **shape: object) -> SinkSettings:
    """Settings of a sink that shapes these tables."""
    return MemorySettings(shape={table: SHAPE.model_copy(update=shape) for table in tables})


def shaped_by_hand(state: Mapping[str, str]) -> dict[str, str]:
    """Key to image, as the store should have it."""
    return {key: text(_row(raw(after))) for key, after in state.items() if _is_kept(raw(after))}


def _is_kept(row: Mapping[str, str]) -> bool:
    return row["good"] == "true" and not row["big"].startswith('"a')


def _row(row: Mapping[str, str]) -> dict[str, str]:
    big = json.loads(row["big"])
    label = "none" if row["label"] == "null" else json.loads(row["label"])
    names = {"doc": "document"}
    kept = {names.get(name, name): value for name, value in row.items() if name != "ratio"}
    if kept["at"] != "null":
        kept["at"] = '"***"'
    heading = json.dumps(label + big[0], ensure_ascii=False)
    return {**kept, "size": str(len(big)), "heading": heading, "copied": row["big"], "kind": '"item"'}


def apply_with_source(sink: Sink, batch: Batch, source: Mapping[str, str]) -> int:
    """Apply a batch as the applier does: rows that lack columns are read from the source. Returns how many."""
    try:
        sink.apply(batch)
    except Rejected as rejected:
        assert {item.reason for item in rejected.items} == {STORED_ROW_MISSING}
        rows = rows_of(batch, [item.key for item in rejected.items if item.key in source])
        whole = [{**row, "after": source[row["key"]], "unchanged": []} for row in rows]
        sink.apply(batch_of(batch.schema, whole))
        return len(rejected.items)
    return 0

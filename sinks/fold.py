"""Folding a batch: of all changes of a key, the one that counts."""

import pyarrow as pa

FOLDED = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("op", pa.string(), nullable=False),
        pa.field("after", pa.string()),
        pa.field("unchanged", pa.list_(pa.string())),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("commit_lsn", pa.int64(), nullable=False),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("schema_id", pa.int32(), nullable=False),
    ]
)
"""What a sink is given: at most one row per key. `op` is `u` (the row is `after`) or `d` (the row is gone).

A row with a non-empty `unchanged` is partial: these columns are absent from `after`, and the stored values stay.
"""

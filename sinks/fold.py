"""Folding a batch: of all changes of a key, the one that counts.

`fold` is the Spark half: of each key the change with the greatest version (at equal versions the later in the log),
and, only where that one is partial, the older changes that may fill it. `sinks.folded.gather` is the other half.
"""

from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.model import PROGRESS_TABLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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

_NEWEST_FIRST = "partition by `table`, key order by version desc, commit_lsn desc, ordinal desc"
_OP = "case when op in ('d', 't', 'm') then op else 'u' end as op"


def fold(changes: "DataFrame") -> "DataFrame":
    """LOG_SCHEMA to the columns of FOLDED and `place`: 1 for the newest change of a key, 2 and on for older ones.

    Older ones are there only for keys whose newest change is partial. Truncates and progress markers have no key, and
    so come out as one row per table. One partition, no exchange, one job: a batch is small, and a shuffle costs more
    than it saves (docs/adr/0010-fold.md).
    """
    lean = changes.where(f"op <> 'm' or `table` = '{PROGRESS_TABLE}'").selectExpr(
        "`table`", "key", _OP, "after", "unchanged", "version", "commit_lsn", "ordinal", "commit_ts", "schema_id"
    )
    ranked = lean.coalesce(1).selectExpr(
        "*",
        f"row_number() over ({_NEWEST_FIRST}) as place",
        f"first_value(size(unchanged) > 0) over ({_NEWEST_FIRST}) as partial",
    )
    return ranked.where("place = 1 or partial").drop("partial", "ordinal")

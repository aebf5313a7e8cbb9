"""The fold by Spark SQL, for batches of more than 64 MB of packed rows, and FOLDED, the schema of every folded batch.

A fold keeps the change with the greatest version of each key (at equal versions the later one in the log) and, only
where that change is partial, the older changes that may fill it. `sinks.spark.batch_reader` chooses between this and
`sinks.fold.arrow`; `sinks.fold.folded.gather` turns the result of either into batches.
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
"""What a sink receives: at most one row per key. `op` is `u` (the row is `after`) or `d` (the row is deleted).

A row with a non-empty `unchanged` is partial: `after` lacks these columns, and the store keeps its values of them.
"""

_KEY = "marker, `table`, key"
_AGE = "version desc, commit_lsn desc, ordinal desc"
_NEWEST_FIRST = f"partition by {_KEY} order by {_AGE}"
READ_ORDINAL = 1 << 62
"""Added to the ordinals of rows that were read from the source. A resync ends with a truncate of the same version, to
remove the rows that were not read: it must not count as later than those that were."""
_ORDINAL = f"ordinal + case when op = 'r' then {READ_ORDINAL} else 0 end as ordinal"
_OP = "case when op in ('d', 't', 'm', 'p') then op else 'u' end as op"
# Older changes of a partial key count 0 bytes: they then have the running sum of the newest one, and its piece.
_WEIGHT = "case when rank = 1 then 200 + ifnull(octet_length(after), 0) else 0 end"
_ROWS = ["`table`", "key", "op", "after", "unchanged", "version", "commit_lsn", "commit_ts", "schema_id"]
_RANKED = [*_ROWS, "ordinal", "rank"]


def fold(changes: "DataFrame") -> "DataFrame":
    """LOG_SCHEMA to the columns of FOLDED, `ordinal` and `rank`: 1 for the newest change of a key, 2 and on for older.

    Older changes are kept only for keys whose newest change is partial. Truncates and progress markers have no key:
    one row per table is left. A removed range has its own text as key: one row is left. `bytes` is the size of the
    batch up to and including the row's key; the progress marker, which is the last row, has the size of the batch.
    One partition, no exchange, one sort: a shuffle costs more than it saves (docs/adr/0010-fold.md).
    """
    narrow = changes.where(f"op <> 'm' or `table` = '{PROGRESS_TABLE}'").selectExpr(
        f"`table` = '{PROGRESS_TABLE}' as marker", _ORDINAL, *_ROWS[:2], _OP, *_ROWS[3:]
    )
    ranked = narrow.coalesce(1).selectExpr(
        "*",
        f"row_number() over ({_NEWEST_FIRST}) as rank",
        f"first_value(size(unchanged) > 0) over ({_NEWEST_FIRST}) as partial",
    )
    up_to_here = f"order by {_KEY}, {_AGE} rows between unbounded preceding and current row"
    return ranked.where("rank = 1 or partial").selectExpr(*_RANKED, f"sum({_WEIGHT}) over ({up_to_here}) as bytes")

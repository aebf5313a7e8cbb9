"""Folding a batch: of all changes of a key, the one that counts.

`fold` is the Spark half: of each key the change with the greatest version (at equal versions the later in the log),
and, only where that one is partial, the older changes that may fill it. `sinks.fold.folded.gather` is the other half.
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

_KEY = "marker, `table`, key"
_AGE = "version desc, commit_lsn desc, ordinal desc"
_NEWEST_FIRST = f"partition by {_KEY} order by {_AGE}"
READ_ORDINAL = 1 << 62
"""Added to the ordinals of rows that were read from the source. A resync ends with a truncate of their own version,
which must not count as later than they are: it removes what they did not bring."""
_ORDINAL = f"ordinal + case when op = 'r' then {READ_ORDINAL} else 0 end as ordinal"
_OP = "case when op in ('d', 't', 'm', 'p') then op else 'u' end as op"
# Older changes of a partial key weigh nothing, so that they share the sum of the newest one and stay beside it.
_WEIGHT = "case when place = 1 then 200 + ifnull(octet_length(after), 0) else 0 end"
_ROWS = ["`table`", "key", "op", "after", "unchanged", "version", "commit_lsn", "commit_ts", "schema_id"]
_PLACED = [*_ROWS, "ordinal", "place"]


def fold(changes: "DataFrame") -> "DataFrame":
    """LOG_SCHEMA to the columns of FOLDED, `ordinal` and `place`: 1 for the newest change of a key, 2 and on for older.

    Older ones are there only for keys whose newest change is partial. Truncates and progress markers have no key, and
    so come out as one row per table; a removed range has its own text as key, and comes out once. `bytes` is the size
    of the batch up to and including the row's key; the marker, which is the last row, has the size of the whole.
    One partition, no exchange, one sort: a batch is small, and a shuffle costs more than it saves
    (docs/adr/0010-fold.md).
    """
    lean = changes.where(f"op <> 'm' or `table` = '{PROGRESS_TABLE}'").selectExpr(
        f"`table` = '{PROGRESS_TABLE}' as marker", _ORDINAL, *_ROWS[:2], _OP, *_ROWS[3:]
    )
    ranked = lean.coalesce(1).selectExpr(
        "*",
        f"row_number() over ({_NEWEST_FIRST}) as place",
        f"first_value(size(unchanged) > 0) over ({_NEWEST_FIRST}) as partial",
    )
    up_to_here = f"order by {_KEY}, {_AGE} rows between unbounded preceding and current row"
    return ranked.where("place = 1 or partial").selectExpr(*_PLACED, f"sum({_WEIGHT}) over ({up_to_here}) as bytes")

"""Rows of large files ordered by bucket, so that a task reads those of its buckets and not the rest. Pure Arrow.

A *stripe* is what would be one row group in the order of the log. Here it is one row group for each group of buckets,
with two more columns: the row's bucket, and its place in the stripe, from which the order of the log is restored.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from cdc.log.key_hash import BUCKETS, buckets_of
from cdc.model import LOG_SCHEMA

BUCKETED = pa.schema([*LOG_SCHEMA, pa.field("bucket", pa.uint8(), nullable=False), pa.field("place", pa.int32())])
LEAST_ROWS = 8_192
"""Rows from which a stripe is ordered by bucket: each row group costs the writer about 0.3 ms."""
_GROUPS = 8


def arranged(rows: pa.Table) -> Iterator[pa.Table]:
    """The row groups of one stripe."""
    buckets = buckets_of(rows.column("key").combine_chunks())
    groups = buckets // (BUCKETS // _GROUPS)
    order = np.argsort(groups, kind="stable")
    places = np.arange(rows.num_rows, dtype=np.int32)
    placed = rows.append_column("bucket", pa.array(buckets)).append_column("place", pa.array(places)).cast(BUCKETED)
    ordered = placed.take(order)
    bounds = np.searchsorted(groups[order], np.arange(_GROUPS + 1)).tolist()
    for low, high in pairwise(bounds):
        if low < high:
            yield ordered.slice(low, high - low)


def in_order(groups: Sequence[pa.Table], low: int, high: int) -> pa.Table:
    """The rows from place `low` up to, not including, `high`, in the order of the log; from all groups or some."""
    rows = pa.concat_tables(groups) if groups else BUCKETED.empty_table()
    places = rows.column("place").to_numpy()
    order = np.argsort(places, kind="stable")
    wanted = order[(places[order] >= low) & (places[order] < high)]
    return rows.select(LOG_SCHEMA.names).take(wanted)


def in_buckets(rows: pa.Table, buckets: range) -> pa.Table:
    """The rows whose keys are in these buckets."""
    if len(buckets) == BUCKETS:
        return rows
    found = buckets_of(rows.column("key").combine_chunks())
    return rows.filter(pa.array((found >= buckets.start) & (found < buckets.stop)))

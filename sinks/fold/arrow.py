"""The fold by Arrow, in the driver: for batches of up to 64 MB of packed rows, replays and fresh views.

`sinks.spark.batch_reader` folds larger batches by Spark SQL (`sinks.fold.spark`). Both give the same result; a
property test compares them.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Ints
from cdc.model import PROGRESS_TABLE
from sinks.fold.spark import FOLDED, READ_ORDINAL


def ranked(changes: pa.Table) -> pa.Table:
    """LOG_SCHEMA to the columns of FOLDED, `ordinal` and `rank`, as `sinks.fold.spark.fold` gives them."""
    rows = changes.filter((pc.field("op") != "m") | (pc.field("table") == PROGRESS_TABLE)).combine_chunks()
    rows = rows.set_column(rows.column_names.index("ordinal"), "ordinal", _ordinal(rows))
    group = _groups(rows)
    newest_first: list[tuple[str, Literal["ascending", "descending"]]] = [("group", "ascending")]
    newest_first += [(name, "descending") for name in ("version", "commit_lsn", "ordinal")]
    numbered = rows.append_column("group", pa.array(group))
    order = np.asarray(pc.sort_indices(numbered, sort_keys=newest_first))
    firsts = np.flatnonzero(np.diff(group[order], prepend=-1))
    rank = np.arange(len(order)) - np.repeat(firsts, np.diff(firsts, append=len(order))) + 1
    partial = _partial(rows)[order]
    kept = (rank == 1) | np.repeat(partial[firsts], np.diff(firsts, append=len(order)))
    found = rows.take(order[kept]).select([*FOLDED.names, "ordinal"])
    found = found.set_column(found.column_names.index("op"), "op", _op(found["op"]))
    return found.append_column("rank", pa.array(rank[kept]))


def _groups(rows: pa.Table) -> Ints:
    """A number for each pair of table and key; the missing key of a truncate counts as a key."""
    tables, keys = (_codes(rows[name]) for name in ("table", "key"))
    combined: Ints = tables * (int(keys.max(initial=0)) + 1) + keys
    return combined


def _codes(column: AnyArray) -> Ints:
    coded: AnyArray = column.combine_chunks().dictionary_encode(null_encoding="encode")
    codes: Ints = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def _ordinal(rows: pa.Table) -> AnyArray:
    """See `sinks.fold.spark.READ_ORDINAL`."""
    read: AnyArray = pc.equal(rows["op"], pa.scalar("r"))
    shift = pc.if_else(read, pa.scalar(READ_ORDINAL), pa.scalar(0))
    return pc.add(rows["ordinal"], shift)


def _partial(rows: pa.Table) -> npt.NDArray[np.bool_]:
    lengths: AnyArray = pc.list_value_length(rows["unchanged"])
    partial: npt.NDArray[np.bool_] = lengths.fill_null(0).to_numpy() > 0
    return partial


def _op(column: AnyArray) -> AnyArray:
    """Inserts, updates and reads become `u`: the row is now `after`."""
    unlike: AnyArray = pc.is_in(column, value_set=pa.array(["d", "t", "m", "p"]))
    return pc.if_else(unlike, column, pa.scalar("u"))

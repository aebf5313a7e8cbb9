"""Rows of a batch as dead letters and back, and changes merged onto the dead letters of their keys. No database."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import RejectedItem
from cdc.json_text.members import splice
from cdc.model import TableSchema
from cdc.ports import Batch
from sinks.apply.dead_letters import DeadLetter
from sinks.fold.spark import FOLDED
from sinks.rows.images import columns, partial_first
from sinks.rows.read_sizes import by_bytes


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """A batch apart from its partial rows whose key has a dead letter."""

    rest: Batch | None
    """Applied first: it has the truncate and the removed ranges. None if there is nothing in it."""
    partial: Batch
    pieces: Sequence[Sequence[str]]
    """The keys of `partial`, few enough at a time that their dead letters, which may be large, fit in memory."""


def split(batch: Batch, sizes: Mapping[str, int]) -> SplitBatch:
    """Split by the keys that have dead letters; `sizes` are the bytes of each."""
    partial, whole = partial_first(batch.rows)
    known = pc.is_in(partial.column("key"), value_set=pa.array(list(sizes), pa.string()))
    merged, others = partial.filter(known), pa.concat_tables([whole, partial.filter(pc.invert(known))])
    needed = others.num_rows or batch.truncated or batch.removed or not merged.num_rows
    pieces = list(by_bytes((key, sizes[key]) for key in columns(merged, "key")[0]))
    return SplitBatch(replace(batch, rows=others) if needed else None, Batch(batch.schema, merged), pieces)


def merged(partial: Batch, keys: Sequence[str], letters: Mapping[str, DeadLetter]) -> Batch:
    """The rows of these keys, with the columns that they lack taken from older dead letters.

    The store never got the dead letters, so its own values of these columns are too old to keep.
    """
    rows = rows_of(partial, keys)
    for row in rows:
        letter = letters.get(row["key"])
        if letter is None or letter.version >= row["version"] or not row["unchanged"] or letter.after is None:
            continue
        after, missing = splice(row["after"], letter.after, row["unchanged"])
        row.update(after=after, unchanged=list(missing))
    return batch_of(partial.schema, rows)


def from_rejected(batch: Batch, rejected: Sequence[RejectedItem], now: datetime) -> list[DeadLetter]:
    """The dead letters of the rows that the store rejected."""
    reasons = {item.key: item.reason for item in rejected}
    return [
        DeadLetter(**{**row, "unchanged": tuple(row["unchanged"] or ())}, reason=reasons[row["key"]], parked_at=now)
        for row in rows_of(batch, list(reasons))
    ]


def to_batch(schema: TableSchema, letters: Mapping[str, DeadLetter]) -> Batch:
    """Dead letters of one schema as changes, to be applied again."""
    return batch_of(schema, [{name: getattr(letter, name) for name in FOLDED.names} for letter in letters.values()])


def batch_of(schema: TableSchema, rows: list[dict[str, Any]]) -> Batch:
    """A batch of rows of FOLDED."""
    return Batch(schema, pa.Table.from_pylist(rows, schema=FOLDED))


def rows_of(batch: Batch, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a batch with these keys."""
    wanted = pc.is_in(batch.rows.column("key"), value_set=pa.array(keys, pa.string()))
    return batch.rows.filter(wanted).to_pylist()

"""Changes put into stored rows, in memory. Pure: rows in, rows out.

The rules are those of the merge (`write.merge`): newer versions win, older ones change nothing, a partial row takes
what it lacks from the live row below it and is an orphan without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools, Ints
from sinks.delta.rows.changes import PARTIAL, TypedChanges, keep_flag, sorted_by
from sinks.delta.schema.layout import DELETED, VERSION


@dataclass(frozen=True, slots=True)
class Decided:
    """For each change, the number of its stored row (or -1), whether it wins over it, and whether it is an orphan."""

    below: Ints
    winners: Bools
    orphans: Bools

    @property
    def replaced(self) -> Ints:
        """The numbers of the stored rows that give way."""
        replaced: Ints = self.below[self.winners & (self.below >= 0)]
        return replaced


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The region's new rows, sorted by key; how many changed; and which changes are orphans."""

    rows: pa.Table
    changed: int
    orphans: Bools


def rewrite(stored: pa.Table, changes: TypedChanges) -> Rewritten:
    """`stored` are all rows of the region, tombstones too, in the columns of `changes.layout.arrow`."""
    decided = decide(stored, changes)
    if not decided.winners.any():
        return Rewritten(stored, 0, decided.orphans)
    kept = np.ones(stored.num_rows, np.bool_)
    kept[decided.replaced] = False
    rows = pa.concat_tables([stored.filter(pa.array(kept)), fresh(stored, changes, decided)])
    return Rewritten(sorted_by(rows, changes.layout.key), int(decided.winners.sum()), decided.orphans)


def decide(stored: pa.Table, changes: TypedChanges) -> Decided:
    """Which changes win; `stored` needs the key, VERSION and DELETED."""
    below = places(stored, changes.rows, changes.layout.key)
    version, deleted = taken(stored[VERSION], below, -1), taken(stored[DELETED], below, True)
    newer = changes.rows[VERSION].to_numpy() > version
    orphans = changes.rows[PARTIAL].to_numpy() & newer & deleted
    return Decided(below, newer & ~orphans, orphans)


def fresh(stored: pa.Table, changes: TypedChanges, decided: Decided) -> pa.Table:
    """The new rows of the winners, whole."""
    rows = filled(stored, changes, decided.below).filter(pa.array(decided.winners))
    return rows.select(changes.layout.arrow.names)


def places(stored: pa.Table, asked: pa.Table, key: Sequence[str]) -> Ints:
    """For each row that is asked for, the number of the stored row with its key, or -1."""
    if len(key) == 1:
        return _single_places(stored[key[0]], asked[key[0]])
    numbered = stored.select(list(key)).append_column("stored_row", pa.array(np.arange(stored.num_rows)))
    wanted = asked.select(list(key)).append_column("asked_row", pa.array(np.arange(asked.num_rows)))
    pairs = wanted.join(numbered, list(key), join_type="inner")
    found = np.full(asked.num_rows, -1)
    found[pairs["asked_row"].to_numpy()] = pairs["stored_row"].to_numpy()
    return found


def _single_places(stored: AnyArray, changes: AnyArray) -> Ints:
    """A hash look-up; keys of several columns need a join."""
    change: AnyArray = pc.index_in(stored, value_set=changes.combine_chunks())
    found = np.full(len(changes), -1)
    known = change.is_valid().to_numpy()
    found[change.drop_null().to_numpy()] = np.flatnonzero(known)
    return found


def taken(column: AnyArray, below: Ints, missing: int | bool) -> npt.NDArray[Any]:
    """Values of stored rows by their numbers, with another value for rows that are missing."""
    rows = pa.array(below, mask=below < 0)
    values: npt.NDArray[Any] = column.take(rows).fill_null(missing).to_numpy()
    return values


def filled(stored: pa.Table, changes: TypedChanges, below: Ints) -> pa.Table:
    """The changes with the columns that they lack taken from the rows below them."""
    rows = changes.rows
    at: AnyArray = pa.array(below, mask=below < 0)
    for number, name in enumerate(changes.kept):
        values = pc.if_else(rows[keep_flag(number)], stored[name].take(at), rows[name])
        rows = rows.set_column(rows.column_names.index(name), name, values)
    return rows

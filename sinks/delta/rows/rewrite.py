"""Changes merged with stored rows in memory. Pure.

The rules are those of the merge (`write.merge`): newer versions win, older ones change nothing, a partial row takes the
columns that it lacks from the live stored row, and is an orphan without one.
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
    """For each change, the number of its stored row (or -1), whether it replaces it, and whether it is an orphan."""

    matches: Ints
    winners: Bools
    orphans: Bools

    @property
    def replaced(self) -> Ints:
        """The numbers of the stored rows that are replaced."""
        replaced: Ints = self.matches[self.winners & (self.matches >= 0)]
        return replaced


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The region's new rows, sorted by key; how many changed; and which changes are orphans."""

    rows: pa.Table
    changed: int
    orphans: Bools


def rewrite(stored: pa.Table, changes: TypedChanges) -> Rewritten:
    """Merge changes with `stored`: all rows of the region with their tombstones, in the columns of `layout.arrow`."""
    decided = decide(stored, changes)
    if not decided.winners.any():
        return Rewritten(stored, 0, decided.orphans)
    kept = np.ones(stored.num_rows, np.bool_)
    kept[decided.replaced] = False
    rows = pa.concat_tables([stored.filter(pa.array(kept)), new_rows(stored, changes, decided)])
    return Rewritten(sorted_by(rows, changes.layout.key), int(decided.winners.sum()), decided.orphans)


def decide(stored: pa.Table, changes: TypedChanges) -> Decided:
    """Which changes win; `stored` needs the key, VERSION and DELETED."""
    matches = matching_rows(stored, changes.rows, changes.layout.key)
    version, deleted = values_at(stored[VERSION], matches, -1), values_at(stored[DELETED], matches, True)
    newer = changes.rows[VERSION].to_numpy() > version
    orphans = changes.rows[PARTIAL].to_numpy() & newer & deleted
    return Decided(matches, newer & ~orphans, orphans)


def new_rows(stored: pa.Table, changes: TypedChanges, decided: Decided) -> pa.Table:
    """The complete new rows of the winners."""
    rows = filled(stored, changes, decided.matches).filter(pa.array(decided.winners))
    return rows.select(changes.layout.arrow.names)


def matching_rows(stored: pa.Table, asked: pa.Table, key: Sequence[str]) -> Ints:
    """For each row of `asked`, the number of the stored row with the same key, or -1."""
    if len(key) == 1:
        return _matching_by_one_column(stored[key[0]], asked[key[0]])
    numbered = stored.select(list(key)).append_column("stored_row", pa.array(np.arange(stored.num_rows)))
    wanted = asked.select(list(key)).append_column("asked_row", pa.array(np.arange(asked.num_rows)))
    pairs = wanted.join(numbered, list(key), join_type="inner")
    found = np.full(asked.num_rows, -1)
    found[pairs["asked_row"].to_numpy()] = pairs["stored_row"].to_numpy()
    return found


def _matching_by_one_column(stored: AnyArray, changes: AnyArray) -> Ints:
    """A hash look-up; keys of several columns need a join."""
    change: AnyArray = pc.index_in(stored, value_set=changes.combine_chunks())
    found = np.full(len(changes), -1)
    known = change.is_valid().to_numpy()
    found[change.drop_null().to_numpy()] = np.flatnonzero(known)
    return found


def values_at(column: AnyArray, matches: Ints, missing: int | bool) -> npt.NDArray[Any]:
    """Values of stored rows by their numbers; `missing` where the number is -1."""
    rows = pa.array(matches, mask=matches < 0)
    values: npt.NDArray[Any] = column.take(rows).fill_null(missing).to_numpy()
    return values


def filled(stored: pa.Table, changes: TypedChanges, matches: Ints) -> pa.Table:
    """The changes with the columns that they lack values_at from their stored rows."""
    rows = changes.rows
    at: AnyArray = pa.array(matches, mask=matches < 0)
    for number, name in enumerate(changes.kept):
        values = pc.if_else(rows[keep_flag(number)], stored[name].take(at), rows[name])
        rows = rows.set_column(rows.column_names.index(name), name, values)
    return rows

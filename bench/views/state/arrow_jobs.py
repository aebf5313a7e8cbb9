"""The two jobs of the bake-off over sorted runs of Arrow columns.

Both are functions of a batch of whole transactions and of the stored state. `Totals` gives one row per key and
transaction, so what it emits does not depend on where batches are cut; `Pairs` gives the net change of a batch.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.views.state.sorted_runs import Rows, SortedRuns, hashed, joined, newest
from cdc.arrays import Bools, Ints


@dataclass(frozen=True, slots=True)
class Emitted:
    """Changed results: columns of equal length."""

    columns: tuple[Ints, ...]


class Totals:
    """Sum and count per key, for the keys of one partition of several."""

    def __init__(self, folder: Path, partition: int, partitions: int) -> None:
        self.main = SortedRuns(folder / f"totals-{partition}", 2)
        self._partition, self._partitions = partition, partitions

    @property
    def position(self) -> int:
        """The number of the last batch in the state."""
        return self.main.position

    def apply(self, number: int, events: pa.Table) -> Emitted:
        """Columns: lsn, key, sum, count."""
        key, lsn, amount, count = _deltas(events)
        mine = _own(key, self._partition, self._partitions)
        key, lsn, amount, count = key[mine], lsn[mine], amount[mine], count[mine]
        order = np.lexsort((lsn, key))
        key, lsn = key[order], lsn[order]
        first = _starts(key, lsn)
        amount, count = np.add.reduceat(amount[order], first), np.add.reduceat(count[order], first)
        key, lsn = key[first], lsn[first]
        own = _starts(key)
        before = _stored(self.main, key[own])
        sums, counts = _running(amount, own, before[0]), _running(count, own, before[1])
        last = np.append(own[1:], len(key)) - 1
        live = (counts > 0).astype(np.int64)
        rows = Rows(key[last], np.zeros(len(last), np.int64), live[last], (sums[last], counts[last]))
        self.main.commit(rows, number)
        return Emitted((lsn, key, sums, counts))


class Pairs:
    """Items with their orders, for the orders of one partition of several."""

    def __init__(self, folder: Path, partition: int, partitions: int) -> None:
        self.orders = SortedRuns(folder / f"orders-{partition}", 1)
        self.main = SortedRuns(folder / f"items-{partition}", 1)
        self._partition, self._partitions = partition, partitions

    @property
    def position(self) -> int:
        """The number of the last batch in the state."""
        return self.main.position

    def apply(self, number: int, events: pa.Table) -> Emitted:
        """Columns: order, item, the order's value, the item's value, live."""
        rows = _states(events)
        rows = rows.take(_own(rows.key, self._partition, self._partitions))
        changed = newest(rows.take(rows.sub == 0)), newest(rows.take(rows.sub != 0))
        if self.orders.position < number:  # a process may have ended between the two commits
            self.orders.commit(changed[0], number)
        self.main.commit(changed[1], number)
        whole = changed[0].key
        beside = changed[1].take(~np.isin(changed[1].key, whole) | (changed[1].live == 0))
        items = joined([self.main.find(whole), beside])
        orders = self.orders.find(np.unique(items.key))
        at = np.searchsorted(orders.key, items.key)
        return Emitted((items.key, items.sub, orders.values[0][at], items.values[0], items.live))


def _own(key: Ints, partition: int, partitions: int) -> Bools:
    own: Bools = hashed(key) % np.uint64(partitions) == partition
    return own


def _states(events: pa.Table) -> Rows:
    key, sub, live, value = (events[name].to_numpy() for name in ("order_id", "item_id", "live", "value"))
    return Rows(key, sub, live, (value,))


def _deltas(events: pa.Table) -> tuple[Ints, Ints, Ints, Ints]:
    """Key, lsn, amount and count of what each change adds; what it takes away is negative."""
    added, taken = (events.filter(events[name].is_valid()) for name in ("key", "old_key"))
    ones = np.ones(added.num_rows + taken.num_rows, np.int64)
    ones[added.num_rows :] = -1
    key = np.concatenate([added["key"].to_numpy(), taken["old_key"].to_numpy()])
    lsn = np.concatenate([added["lsn"].to_numpy(), taken["lsn"].to_numpy()])
    amount = np.concatenate([added["amount"].to_numpy(), taken["old_amount"].to_numpy()])
    return key, lsn, amount * ones, ones


def _starts(*columns: Ints) -> Ints:
    """Where a new combination of values begins in sorted columns."""
    changed = np.zeros(len(columns[0]), np.bool_)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changed)


def _stored(state: SortedRuns, keys: Ints) -> tuple[Ints, Ints]:
    """The stored sum and count of each of the sorted keys, 0 where there is none."""
    rows = state.find(keys)
    at = np.searchsorted(keys, rows.key)
    sums, counts = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    sums[at], counts[at] = rows.values
    return sums, counts


def _running(amounts: Ints, own: Ints, before: Ints) -> Ints:
    """The running total within each key; its first amount is at `own`."""
    total = np.cumsum(amounts)
    base = before - (total[own] - amounts[own])
    lengths = np.diff(np.append(own, len(amounts)))
    running: Ints = total + np.repeat(base, lengths)
    return running

"""The two jobs of the bake-off over the state tables of views (`views.state`), with a checkpoint after each batch.

Both are functions of a batch of whole transactions and of the stored state. `Totals` gives one row per key and
transaction, so what it emits does not depend on where batches are cut; `Pairs` gives the net change of a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools, Ints
from views.state import checkpoint
from views.state.key_hash import hashes
from views.state.runs import merged
from views.state.table import StateTable

_POSITION = "position"


@dataclass(frozen=True, slots=True)
class Emitted:
    """Changed results: columns of equal length."""

    columns: tuple[Ints, ...]


class StoredTables:
    """The tables of one partition of several, in a folder, with the number of the last batch that they contain."""

    def __init__(self, folder: Path, columns: Mapping[str, tuple[str, ...]]) -> None:
        self._folder = folder
        self.tables = {
            name: StateTable(pa.schema([(each, pa.int64()) for each in own])) for name, own in columns.items()
        }
        facts = checkpoint.facts_of(folder)
        self.position = -1
        if facts is not None:
            checkpoint.load(folder, self.tables)
            self.position = int(facts[_POSITION])

    def save(self, position: int) -> None:
        """Make the tables durable."""
        checkpoint.save(self._folder, self.tables, {_POSITION: str(position)})
        self.position = position

    def files(self) -> tuple[int, int]:
        """Runs, and bytes of all files."""
        runs = sum(len(table.runs) for table in self.tables.values())
        return runs, sum(path.stat().st_size for path in self._folder.iterdir())

    def erase(self, key: int) -> None:
        """Remove the rows of a key, and write every file without them."""
        keys = _texts(np.array([key]))
        for table in self.tables.values():
            rows = table.lookup(hashes(keys))
            if rows.num_rows:
                table.put(_texts(_column(rows, "key")), _identities(rows), np.zeros(rows.num_rows, np.bool_), rows)
            table.stored([merged(table.runs, keep_removed=False)])
        self.save(self.position)


class Totals:
    """Sum and count per key, for the keys of one partition of several."""

    columns: Mapping[str, tuple[str, ...]] = {"main": ("key", "sum", "count")}

    def __init__(self, stored: StoredTables, partition: int, partitions: int) -> None:
        self.stored = stored
        self._partition, self._partitions = partition, partitions

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
        table = self.stored.tables["main"]
        before = _totals_of(table, key[own])
        sums, counts = _running(amount, own, before[0]), _running(count, own, before[1])
        last = np.append(own[1:], len(key)) - 1
        keys = _texts(key[last])
        table.put(keys, keys, counts[last] > 0, _table(self.columns["main"], key[last], sums[last], counts[last]))
        self.stored.save(number)
        return Emitted((lsn, key, sums, counts))


class Pairs:
    """Items with their orders, for the orders of one partition of several."""

    columns: Mapping[str, tuple[str, ...]] = {"main": ("key", "item", "value"), "orders": ("key", "item", "value")}

    def __init__(self, stored: StoredTables, partition: int, partitions: int) -> None:
        self.stored = stored
        self._partition, self._partitions = partition, partitions

    def apply(self, number: int, events: pa.Table) -> Emitted:
        """Columns: order, item, the order's value, the item's value, live."""
        rows = events.filter(pa.array(_own(_column(events, "order_id"), self._partition, self._partitions)))
        rows = rows.select(["order_id", "item_id", "value", "live"]).rename_columns(["key", "item", "value", "live"])
        whole = pc.equal(rows["item"], pa.scalar(0))
        orders, items = rows.filter(whole), rows.filter(pc.invert(whole))
        for name, changed in (("orders", orders), ("main", items)):
            live = _column(changed, "live") == 1
            self.stored.tables[name].put(_texts(_column(changed, "key")), _identities(changed), live, changed)
        self.stored.save(number)
        return self._emitted(np.unique(_column(orders, "key")), items)

    def _emitted(self, orders: Ints, items: pa.Table) -> Emitted:
        """All items of the changed orders, and the other changed items; deleted ones in any case."""
        live = _column(items, "live") == 1
        beside = _last(items.filter(pa.array(~(live & np.isin(_column(items, "key"), orders)))))
        found = self.stored.tables["main"].lookup(hashes(_texts(orders)))
        key, item, value = (
            np.concatenate([_column(found, name), _column(beside, name)]) for name in self.columns["main"]
        )
        alive = np.concatenate([np.ones(found.num_rows, np.int64), _column(beside, "live")])
        parents = self.stored.tables["orders"].lookup(hashes(_texts(np.unique(key))))
        order = np.argsort(_column(parents, "key"))
        at = order[np.searchsorted(_column(parents, "key"), key, sorter=order)]
        return Emitted((key, item, _column(parents, "value")[at], value, alive))


def _texts(numbers: Ints) -> AnyArray:
    return pc.cast(pa.array(numbers), pa.string())


def _identities(rows: pa.Table) -> AnyArray:
    """What tells the rows of one key apart."""
    return _texts(_column(rows, "item" if "item" in rows.column_names else "key"))


def _column(rows: pa.Table, name: str) -> Ints:
    values: Ints = rows[name].to_numpy()
    return values


def _table(names: tuple[str, ...], *columns: Ints) -> pa.Table:
    return pa.table(dict(zip(names, map(pa.array, columns), strict=True)))


def _last(rows: pa.Table) -> pa.Table:
    """The last row of each item."""
    items = _column(rows, "item")[::-1]
    places = len(items) - 1 - np.unique(items, return_index=True)[1]
    return rows.take(places)


def _own(key: Ints, partition: int, partitions: int) -> Bools:
    own: Bools = hashes(_texts(key), 1) % np.uint64(partitions) == partition
    return own


def _deltas(events: pa.Table) -> tuple[Ints, Ints, Ints, Ints]:
    """Key, lsn, amount and count of what each change adds; what it takes away is negative."""
    added, taken = (events.filter(events[name].is_valid()) for name in ("key", "old_key"))
    ones = np.ones(added.num_rows + taken.num_rows, np.int64)
    ones[added.num_rows :] = -1
    key = np.concatenate([_column(added, "key"), _column(taken, "old_key")])
    lsn = np.concatenate([_column(added, "lsn"), _column(taken, "lsn")])
    amount = np.concatenate([_column(added, "amount"), _column(taken, "old_amount")])
    return key, lsn, amount * ones, ones


def _starts(*columns: Ints) -> Ints:
    """Where a new combination of values begins in sorted columns."""
    changed = np.zeros(len(columns[0]), np.bool_)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changed)


def _totals_of(table: StateTable, keys: Ints) -> tuple[Ints, Ints]:
    """The stored sum and count of each of the sorted keys, 0 where there is none."""
    rows = table.lookup(hashes(_texts(keys)))
    at = np.searchsorted(keys, _column(rows, "key"))
    sums, counts = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    sums[at], counts[at] = _column(rows, "sum"), _column(rows, "count")
    return sums, counts


def _running(amounts: Ints, own: Ints, before: Ints) -> Ints:
    """The running total within each key; its first amount is at `own`."""
    total = np.cumsum(amounts)
    base = before - (total[own] - amounts[own])
    lengths = np.diff(np.append(own, len(amounts)))
    running: Ints = total + np.repeat(base, lengths)
    return running

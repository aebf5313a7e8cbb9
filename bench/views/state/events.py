"""The changes of the state bake-off: the same rows in the same order for every contender, in Parquet files.

One file is one batch. The trap: a contender that reads the files in another order than that of their names computes
something else, so their names sort by number and their times of change follow each other.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cdc.arrays import AnyArray, Bools, Ints

PER_TRANSACTION = 5
_START_US = 1_767_225_600_000_000
_LATE_SHARE, _LATE_SECONDS = 0.05, 1_800
_FIRST_FILE_TIME = 1_700_000_000


@dataclass(slots=True)
class Amounts:
    """The changes of rows that have a key and an amount. A row's update may move it to another key.

    Columns: `lsn`, `at` (event time; one row in twenty is up to half an hour late), and key and amount after and before
    the change, null where there is none. The rows of a transaction share their `lsn`.
    """

    keys: int
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    _key: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _amount: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _alive: Bools = field(default_factory=lambda: np.empty(0, np.bool_))
    _count: int = 0

    def load(self) -> pa.Table:
        """One row for each key."""
        return self._inserted(np.arange(self.keys))

    def changes(self, count: int) -> pa.Table:
        """Half of them change an amount, a fifth moves rows to other keys, the rest inserts and deletes in equal parts.
        No two touch the same row."""
        alive = np.flatnonzero(self._alive)
        fresh = self._inserted(self.random.integers(0, self.keys, int(count * 0.15)))
        rows = self.random.choice(alive, count - fresh.num_rows, replace=False)
        updated, deleted = rows[: int(count * 0.7)], rows[int(count * 0.7) :]
        old_key, old_amount = self._key[rows].copy(), self._amount[rows].copy()
        self._amount[updated] = self.random.integers(1, 10_000, len(updated))
        moved = updated[: int(count * 0.2)]
        self._key[moved] = self.random.integers(0, self.keys, len(moved))
        self._alive[deleted] = False
        gone = np.arange(len(rows)) >= len(updated)
        others = self._table(
            pa.array(self._key[rows], mask=gone),
            pa.array(self._amount[rows], mask=gone),
            pa.array(old_key),
            pa.array(old_amount),
        )
        mixed = pa.concat_tables([fresh, others]).take(self.random.permutation(count))
        return mixed.set_column(0, "lsn", self._lsns(count)).set_column(1, "at", self._times(count))

    def totals(self) -> dict[int, tuple[int, int]]:
        """Sum and count of each key that has rows: what every contender has to arrive at."""
        keys, amounts = self._key[self._alive], self._amount[self._alive]
        sums, counts = np.zeros(self.keys, np.int64), np.zeros(self.keys, np.int64)
        np.add.at(sums, keys, amounts)
        np.add.at(counts, keys, 1)
        return {int(key): (int(sums[key]), int(counts[key])) for key in np.flatnonzero(counts)}

    def _inserted(self, keys: Ints) -> pa.Table:
        amounts = self.random.integers(1, 10_000, len(keys))
        self._key = np.concatenate([self._key, keys])
        self._amount = np.concatenate([self._amount, amounts])
        self._alive = np.concatenate([self._alive, np.ones(len(keys), np.bool_)])
        none = pa.nulls(len(keys), pa.int64())
        return self._table(pa.array(keys), pa.array(amounts), none, none)

    def _table(self, *sides: AnyArray) -> pa.Table:
        count = len(sides[0])
        columns = [self._lsns(count), self._times(count), *sides]
        return pa.table(columns, names=["lsn", "at", "key", "amount", "old_key", "old_amount"])

    def _lsns(self, count: int) -> AnyArray:
        numbers = self._count + np.arange(count)
        self._count += count
        return pa.array(numbers // PER_TRANSACTION * 10 + 10)

    def _times(self, count: int) -> AnyArray:
        late = self.random.random(count) < _LATE_SHARE
        micros = _START_US + (self._count + np.arange(count)) * 10_000
        micros -= np.where(late, self.random.integers(0, _LATE_SECONDS * 1_000_000, count), 0)
        return pa.array(micros, pa.timestamp("us", tz="UTC"))


@dataclass(slots=True)
class Orders:
    """The changes of orders (`id`) and of their items (`id`, `order_id`), three items an order at first.

    Columns of both: `lsn`, `order_id`, `item_id` (0: the change of an order), `value`, `live` (0: deleted).
    """

    rows: int
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    _values: dict[tuple[int, int], int] = field(default_factory=dict)
    _order: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _item: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _value: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _live: Bools = field(default_factory=lambda: np.empty(0, np.bool_))
    _count: int = 0

    @property
    def orders(self) -> int:
        """How many there are; none is ever deleted, so that every item has one."""
        return self.rows // 4

    def load(self) -> pa.Table:
        """Every order with three items."""
        orders = np.arange(1, self.orders + 1)
        items = np.arange(1, 3 * self.orders + 1)
        self._order = np.concatenate([orders, (items - 1) // 3 + 1])
        self._item = np.concatenate([np.zeros(len(orders), np.int64), items])
        self._value = self.random.integers(1, 10_000, len(self._order))
        self._live = np.ones(len(self._order), np.bool_)
        return self._table(np.arange(len(self._order)))

    def changes(self, count: int) -> pa.Table:
        """One in ten is an order's update, 75 % update items, the rest inserts and deletes items in equal parts."""
        fresh = self._inserted(int(count * 0.075))
        orders = self.random.choice(self.orders, count // 10, replace=False)
        items = np.flatnonzero(self._live[self.orders : fresh[0]]) + self.orders
        touched = self.random.choice(items, count - len(fresh) - len(orders), replace=False)
        deleted = touched[: len(fresh)]
        rows = np.concatenate([orders, touched])
        self._value[rows] = self.random.integers(1, 10_000, len(rows))
        self._live[deleted] = False
        return self._table(self.random.permutation(np.concatenate([rows, fresh])))

    def pairs(self) -> dict[tuple[int, int], tuple[int, int]]:
        """By order and item: the values of both. What every contender has to arrive at."""
        items = np.flatnonzero(self._live & (self._item > 0))
        orders = self._order[items]
        values = zip(self._value[orders - 1].tolist(), self._value[items].tolist(), strict=True)
        return dict(zip(zip(orders.tolist(), self._item[items].tolist(), strict=True), values, strict=True))

    def _inserted(self, count: int) -> Ints:
        at = len(self._order)
        self._order = np.concatenate([self._order, self.random.integers(1, self.orders + 1, count)])
        self._item = np.concatenate([self._item, np.arange(at, at + count)])
        self._value = np.concatenate([self._value, self.random.integers(1, 10_000, count)])
        self._live = np.concatenate([self._live, np.ones(count, np.bool_)])
        return np.arange(at, at + count)

    def _table(self, rows: Ints) -> pa.Table:
        numbers = self._count + np.arange(len(rows))
        self._count += len(rows)
        columns = [
            numbers // PER_TRANSACTION * 10 + 10,
            self._order[rows],
            self._item[rows],
            self._value[rows],
            self._live[rows].astype(np.int64),
        ]
        names = ("lsn", "order_id", "item_id", "value", "live")
        return pa.table(dict(zip(names, map(pa.array, columns), strict=True)))


def write_batch(folder: Path, number: int, rows: pa.Table) -> None:
    """One batch. Spark's file source goes by times of change, so those follow the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:06d}.parquet"
    aside = folder / f".{path.name}"
    pq.write_table(rows, aside)
    os.utime(aside, (_FIRST_FILE_TIME + number, _FIRST_FILE_TIME + number))
    aside.rename(path)


def write_batches(folder: Path, rows: pa.Table, size: int, first: int = 0) -> int:
    """The same rows in batches of a size, from a number on; returns the number after the last."""
    number = first
    for start in range(0, rows.num_rows, size):
        write_batch(folder, number, rows.slice(start, size))
        number += 1
    return number


def numbers(folder: Path) -> list[int]:
    """The numbers of the batches in a folder, in order."""
    return sorted(int(path.stem) for path in folder.glob("[0-9]*.parquet"))


def read_batch(folder: Path, number: int) -> pa.Table:
    """The rows of one batch."""
    return pq.read_table(folder / f"{number:06d}.parquet", memory_map=True)

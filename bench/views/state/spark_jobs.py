"""The two jobs of the bake-off in Spark: with its built-in operators, and with transformWithState.

`built_in` aggregates signed amounts in update mode, and joins the two streams of changes. `by_rows` and `by_pandas`
keep the state in a StatefulProcessor. Every query has the state store RocksDB. The trap of the built-in join: it emits
every combination of an order's versions with an item's versions, and stores them all; which pair is the current one is
left to whoever reads the output (`current_pairs`).
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from bench.views.state.measured import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS = "lsn bigint, at timestamp, key bigint, amount bigint, old_key bigint, old_amount bigint"
CHANGES = "lsn bigint, order_id bigint, item_id bigint, value bigint, live bigint"
STATE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
_TOTAL = "key bigint, sum bigint, count bigint"
_PAIR = "order_id bigint, item_id bigint, order_value bigint, item_value bigint, live bigint"
JOBS = ("totals", "pairs")
CONTENDERS = ("built_in", "by_rows", "by_pandas")


def query(spark: "SparkSession", contender: str, job: str, folder: Path) -> "DataFrame":
    """The streaming result of a job over the batches in a folder, one file at a time."""
    if job == "totals":
        deltas = signed(stream(spark, EVENTS, folder))
        return deltas.groupBy("key").agg({"amount": "sum", "one": "sum"}) if contender == "built_in" else _kept(
            contender, deltas, "key", _TOTALS[contender], _TOTAL
        )  # fmt: skip
    changes = partial(stream, spark, CHANGES, folder)
    if contender == "built_in":
        return joined(changes(), changes())
    return _kept(contender, changes(), "order_id", _PAIRS[contender], _PAIR)


def mode(contender: str, job: str) -> str:
    """A join adds rows and replaces none."""
    return "append" if (contender, job) == ("built_in", "pairs") else "update"


def stream(spark: "SparkSession", schema: str, folder: Path, files: int = 1) -> "DataFrame":
    """The files of a folder as a stream."""
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", files).option("latestFirst", "false")
    return reader.parquet(str(folder))


def signed(events: "DataFrame") -> "DataFrame":
    """What each change adds, and, negative, what it takes away."""
    both = "inline(array(named_struct('key', key, 'amount', amount, 'one', 1L), "
    both += "named_struct('key', old_key, 'amount', -old_amount, 'one', -1L)))"
    return events.selectExpr("at", both).where("key is not null")


def joined(orders: "DataFrame", items: "DataFrame") -> "DataFrame":
    """Every version of an order with every version of its items."""
    left = orders.where("item_id = 0").selectExpr("order_id", "value as order_value", "lsn as order_lsn")
    right = items.where("item_id > 0").selectExpr(
        "order_id as parent", "item_id", "value as item_value", "lsn as item_lsn", "live"
    )
    return left.join(right, left["order_id"] == right["parent"])


def current_pairs(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Of each pair the newest of its versions, without those of deleted items."""
    found: dict[tuple[int, int], Mapping[str, Any]] = {}
    for row in rows:
        pair = (row["order_id"], row["item_id"])
        if pair not in found or _versions(found[pair]) <= _versions(row):
            found[pair] = row
    return {pair: (row["order_value"], row["item_value"]) for pair, row in found.items() if row["live"]}


def _versions(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["item_lsn"], row["order_lsn"]


def _kept(contender: str, rows: "DataFrame", key: str, processor: StatefulProcessor, schema: str) -> "DataFrame":
    groups = rows.groupBy(key)
    keep = groups.transformWithState if contender == "by_rows" else groups.transformWithStateInPandas
    return keep(processor, schema, "Update", "None")


class _Totals(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", "sum bigint, count bigint")

    def _add(self, amount: int, count: int) -> tuple[int, int]:
        stored = self._total.get() or (0, 0)
        total = int(stored[0] + amount), int(stored[1] + count)
        if total[1]:
            self._total.update(total)
        else:
            self._total.clear()
        return total


class TotalsByRows(_Totals):
    """Sum and count per key; a key without rows has the count 0, and no state."""

    def handleInputRows(self, key: tuple[int], rows: Iterator[Any], timerValues: object) -> Iterator[Row]:  # noqa: N802, N803
        """One row of output per key and batch."""
        amount = count = 0
        for row in rows:
            amount += row.amount
            count += row.one
        total = self._add(amount, count)
        yield Row(key=key[0], sum=total[0], count=total[1])


class TotalsByPandas(_Totals):
    """The same, over DataFrames."""

    def handleInputRows(self, key: tuple[int], rows: Iterator[Any], timerValues: object) -> Iterator[pd.DataFrame]:  # noqa: N802, N803
        """One row of output per key and batch."""
        amount = count = 0
        for frame in rows:
            amount += int(frame["amount"].sum())
            count += int(frame["one"].sum())
        total = self._add(amount, count)
        yield pd.DataFrame({"key": [key[0]], "sum": [total[0]], "count": [total[1]]})


class _Pairs(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._order = handle.getValueState("order", "value bigint")
        self._items = handle.getMapState("items", "item_id bigint", "value bigint")

    def _change(self, order: int, changes: Iterable[tuple[int, int, int, int]]) -> list[tuple[int, ...]]:
        """Item, value and live of each change, in the order of the log; returns the rows to emit."""
        whole, touched, gone = False, set(), []
        for _, item, value, live in sorted(changes):
            if item == 0:
                self._order.update((value,))
                whole = True
            elif live:
                self._items.updateValue((item,), (value,))
                touched.add(item)
            else:
                self._items.removeKey((item,))
                touched.discard(item)
                gone.append((order, item, 0, value, 0))
        (parent,) = self._order.get() or (None,)
        if whole:
            stored = {key[0]: value[0] for key, value in self._items.iterator()}
        else:
            stored = {item: (self._items.getValue((item,)) or (None,))[0] for item in touched}
        return gone + [(order, item, parent, value, 1) for item, value in stored.items()]


class PairsByRows(_Pairs):
    """The items of an order, with the order's value."""

    def handleInputRows(self, key: tuple[int], rows: Iterator[Any], timerValues: object) -> Iterator[Row]:  # noqa: N802, N803
        """Changed pairs, all of the order's if the order has changed."""
        for pair in self._change(key[0], ((row.lsn, row.item_id, row.value, row.live) for row in rows)):
            yield Row(**dict(zip(COLUMNS["pairs"], pair, strict=True)))


class PairsByPandas(_Pairs):
    """The same, over DataFrames."""

    def handleInputRows(self, key: tuple[int], rows: Iterator[Any], timerValues: object) -> Iterator[pd.DataFrame]:  # noqa: N802, N803
        """Changed pairs, all of the order's if the order has changed."""
        changes = [
            tuple(map(int, change))
            for frame in rows
            for change in zip(frame["lsn"], frame["item_id"], frame["value"], frame["live"], strict=True)
        ]
        pairs = self._change(int(key[0]), changes)  # type: ignore[arg-type]
        yield pd.DataFrame(pairs, columns=list(COLUMNS["pairs"]))


_TOTALS: Mapping[str, Any] = {"by_rows": TotalsByRows(), "by_pandas": TotalsByPandas()}
_PAIRS: Mapping[str, Any] = {"by_rows": PairsByRows(), "by_pandas": PairsByPandas()}

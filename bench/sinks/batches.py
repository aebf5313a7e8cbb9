"""The cost of a batch in a store, with the same table and the same batches for all stores.

`costs` returns {keys: {changes: {"seconds", "cpu_us_per_change"}}}: a whole `apply`, from JSON images to the store's
answer, median of some runs. Keys are `recent` (the highest ones) or `spread` (random all over the table).
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Ints
from cdc.model import Column, PgType, TableId, TableSchema
from cdc.ports import Batch, Sink
from sinks.fold.spark import FOLDED

Costs = dict[str, dict[str, dict[str, float]]]

SIZES = (10, 1_000, 100_000)
WHEN = datetime(2026, 3, 1, 12, tzinfo=UTC)
TABLE = TableSchema(
    TableId("bench", "orders"),
    (
        Column("id", PgType(20, "int8"), key=True),
        Column("customer", PgType(20, "int8")),
        Column("amount", PgType(1700, "numeric"), ((12 << 16) | 2) + 4),
        Column("status", PgType(25, "text")),
        Column("note", PgType(25, "text")),
        Column("updated_at", PgType(1184, "timestamptz")),
    ),
    1,
)


def filled(store: str, rows: int, fill: Callable[[int], None]) -> None:
    """Fill an empty table with so many rows and print how long it took: ten million rows take minutes."""
    begun = time.monotonic()
    fill(rows)
    print(f"{store}: {rows} rows in {time.monotonic() - begun:.0f} s", flush=True)


def costs(sink: Sink, rows: int, batches: Sequence[int], runs: int, server: Callable[[], float] | None = None) -> Costs:
    """Apply batches of each size, in the order given. `server` returns the CPU seconds of the store, if it is a server.

    A server first gets one large batch that is not counted: a JVM that has seen few rows is slower than one that was
    just given ten million.
    """
    random, versions = np.random.default_rng(7), itertools.count(1_001)
    if server:
        sink.apply(batch_of(_keys("spread", rows, max(batches), random), next(versions)))
    clocks = {"cpu": time.process_time} | ({"server_cpu": server} if server else {})
    found: Costs = {"recent": {}, "spread": {}}
    for size in batches:
        for kind, each in found.items():
            made = (batch_of(_keys(kind, rows, size, random), next(versions)) for _ in range(runs))
            taken = [_taken(sink, batch, (time.monotonic, *clocks.values())) for batch in made]
            wall, *used = (statistics.median(one) for one in zip(*taken, strict=True))
            each_us = 1e6 / min(size, rows)
            cpu = {f"{name}_us_per_change": round(one * each_us, 1) for name, one in zip(clocks, used, strict=True)}
            each[str(size)] = {"seconds": round(wall, 3), **cpu}
    return found


def _taken(sink: Sink, batch: Batch, clocks: Sequence[Callable[[], float]]) -> list[float]:
    begun = [clock() for clock in clocks]
    sink.apply(batch)
    return [clock() - then for clock, then in zip(clocks, begun, strict=True)]


def _keys(kind: str, rows: int, size: int, random: np.random.Generator) -> Ints:
    if kind == "recent":
        return np.arange(max(0, rows - size), rows)
    return random.choice(rows, min(size, rows), replace=False)


def batch_of(ids: Ints, version: int) -> Batch:
    """A batch of whole rows as JSON images, built column by column."""
    row = {name: pc.cast(value, pa.string()) for name, value in values(ids).items()}
    key = joined('{"id":', row["id"], "}")
    after = joined(
        '{"id":', row["id"], ',"customer":', row["customer"], ',"amount":', row["amount"], ".00",
        ',"status":"', row["status"], '","note":"', row["note"], '","updated_at":"2026-03-01T12:00:00Z"}',
    )  # fmt: skip
    count = len(ids)
    columns: dict[str, Any] = {
        "table": pa.repeat(str(TABLE.table), count),
        "key": key,
        "op": pa.repeat("u", count),
        "after": after,
        "unchanged": pa.nulls(count, pa.list_(pa.string())),
        "version": pa.repeat(pa.scalar(version, pa.int64()), count),
        "commit_lsn": pa.repeat(pa.scalar(version + 1, pa.int64()), count),
        "commit_ts": pa.repeat(pa.scalar(WHEN, pa.timestamp("us", tz="UTC")), count),
        "schema_id": pa.repeat(pa.scalar(1, pa.int32()), count),
    }
    return Batch(TABLE, pa.table(columns).cast(FOLDED))


def values(ids: Ints) -> dict[str, AnyArray]:
    """The values of the rows with these keys, without the time; amounts are whole numbers."""
    remarks = pc.cast(pa.array(ids * 104_729 % 1_000_003), pa.string())
    return {
        "id": pa.array(ids),
        "customer": pa.array(ids * 7919 % 100_003),
        "amount": pa.array(ids * 31 % 10_000),
        "status": pa.array(["open", "paid", "sent", "done"]).take(ids % 4),
        "note": joined("order of ", remarks, " with a remark"),
    }


def joined(*parts: AnyArray) -> AnyArray:
    """Concatenate texts, row by row."""
    return pc.binary_join_element_wise(*parts, "")

"""What a batch costs in Delta, by its size and by the size of the table: the cost should grow with the batch alone.

`measure` gives {table rows: {keys: {changes: {"seconds", "cpu_us_per_change"}}}}: a whole `apply`, JSON images to
durable commit, median of some runs. Keys are `recent` (the highest ones) or `spread` (random all over the table).
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake

from cdc.model import Column, PgType, TableId, TableSchema
from cdc.ports import Batch
from sinks import delta
from sinks.context import SinkContext
from sinks.delta_json import AnyArray
from sinks.delta_layout import COMMITTED, DELETED, VERSION, new_layout
from sinks.delta_write import target_size
from sinks.fold import FOLDED

Ints = npt.NDArray[np.int64]
Costs = dict[str, dict[str, dict[str, float]]]

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
_WHEN = datetime(2026, 3, 1, 12, tzinfo=UTC)
_BYTES_A_ROW = 30
_CHUNK = 1_000_000


def measure(
    tables: Sequence[int], batches: Sequence[int], runs: int = 3, folder: Path | None = None
) -> dict[str, Costs]:
    """Build each table once, then apply batches of each size to it, small ones first."""
    return {str(rows): _of_table(rows, batches, runs, folder) for rows in tables}


def _of_table(rows: int, batches: Sequence[int], runs: int, folder: Path | None) -> Costs:
    place = Path(tempfile.mkdtemp(prefix="millrace-delta-", dir=folder))
    try:
        sink = delta.open_sink(delta.DeltaSettings(path=str(place / "lake"), maintain_minutes=0), SinkContext(place))
        sink.prepare(TABLE)
        _load(sink, rows)
        random = np.random.default_rng(7)
        version = 1_000
        costs: Costs = {"recent": {}, "spread": {}}
        for size in batches:
            for kind, found in costs.items():
                taken = []
                for _ in range(runs):
                    version += 1
                    taken.append(_apply(sink, batch_of(keys_of(kind, rows, size, random), version)))
                found[str(size)] = median_of(taken, size)
        return costs
    finally:
        shutil.rmtree(place, ignore_errors=True)


def keys_of(kind: str, rows: int, size: int, random: np.random.Generator) -> Ints:
    """The keys of a batch: the highest ones, or some from all over the table."""
    if kind == "recent":
        return np.arange(max(0, rows - size), rows)
    return random.choice(rows, min(size, rows), replace=False)


def _apply(sink: delta.DeltaSink, batch: Batch) -> tuple[float, float]:
    wall, cpu = time.monotonic(), time.process_time()
    sink.apply(batch)
    return time.monotonic() - wall, time.process_time() - cpu


def median_of(taken: Sequence[tuple[float, float]], size: int) -> dict[str, float]:
    """Of pairs of wall time and CPU."""
    wall, cpu = (statistics.median(one[part] for one in taken) for part in (0, 1))
    return {"seconds": round(wall, 3), "cpu_us_per_change": round(cpu / size * 1e6, 1)}


def _load(sink: delta.DeltaSink, rows: int) -> None:
    """Rows in key order, written as the sink would leave them, without the detour over JSON."""
    schema = new_layout(TABLE).arrow
    for start in range(0, rows, _CHUNK):
        ids = np.arange(start, min(rows, start + _CHUNK))
        size = target_size(rows * _BYTES_A_ROW)
        write_deltalake(sink.store(TABLE.table).current(), _rows(ids, schema), mode="append", target_file_size=size)


def _rows(ids: Ints, schema: pa.Schema) -> pa.Table:
    values = {
        "id": pa.array(ids),
        "customer": pa.array(_customers(ids)),
        "amount": pc.cast(pc.cast(pa.array(_amounts(ids)), pa.decimal128(21, 2)), pa.decimal128(12, 2)),
        "status": _status(ids),
        "note": _notes(ids),
        "updated_at": pa.scalar(_WHEN),
        VERSION: pa.scalar(100, pa.int64()),
        DELETED: pa.scalar(False),
        COMMITTED: pa.scalar(_WHEN),
    }
    whole = {
        name: value if isinstance(value, pa.Array) else pa.repeat(value, len(ids)) for name, value in values.items()
    }
    return pa.table(whole).cast(schema)


def batch_of(ids: Ints, version: int) -> Batch:
    """Whole rows as JSON images, made column by column."""
    key = _joined('{"id":', _text(ids), "}")
    after = _joined(
        '{"id":', _text(ids), ',"customer":', _text(_customers(ids)), ',"amount":', _text(_amounts(ids)), ".00",
        ',"status":"', _status(ids), '","note":"', _notes(ids), '","updated_at":"2026-03-01T12:00:00Z"}',
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
        "commit_ts": pa.repeat(pa.scalar(_WHEN, pa.timestamp("us", tz="UTC")), count),
        "schema_id": pa.repeat(pa.scalar(1, pa.int32()), count),
    }
    return Batch(TABLE, pa.table(columns).cast(FOLDED))


def _customers(ids: Ints) -> Ints:
    return ids * 7919 % 100_003


def _amounts(ids: Ints) -> Ints:
    return ids * 31 % 10_000


def _status(ids: Ints) -> AnyArray:
    return pa.array(["open", "paid", "sent", "done"]).take(ids % 4)


def _notes(ids: Ints) -> AnyArray:
    return _joined("order of ", _text(ids * 104_729 % 1_000_003), " with a remark")


def _text(numbers: Ints) -> AnyArray:
    return pc.cast(pa.array(numbers), pa.string())


def _joined(*parts: AnyArray) -> AnyArray:
    return pc.binary_join_element_wise(*parts, "")


def main() -> None:
    """Print the costs as JSON: python -m bench.delta_batches [largest table]."""
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    tables = [rows for rows in (100_000, 1_000_000, 10_000_000) if rows <= largest]
    print(json.dumps(measure(tables, (10, 1_000, 100_000)), indent=2))


if __name__ == "__main__":
    main()

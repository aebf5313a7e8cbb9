"""The cost of a batch in Delta by the size of the batch and of the table: it should depend on the batch alone.

`measure` returns `bench.sinks.batches.costs` for each size of table.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake

from bench.sinks.batches import SIZES, TABLE, WHEN, Costs, costs, filled, values
from cdc.arrays import Ints
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.schema.layout import COMMITTED, DELETED, VERSION, new_layout
from sinks.delta.settings import DeltaSettings
from sinks.delta.write.writer import target_size

_BYTES_A_ROW = 30
_CHUNK = 1_000_000


def measure(
    tables: Sequence[int], batches: Sequence[int], runs: int = 3, folder: Path | None = None
) -> dict[str, Costs]:
    """Build each table once, then apply batches of each size to it, small ones first."""
    return {str(rows): _of_table(rows, batches, runs, folder) for rows in tables}


def _of_table(rows: int, batches: Sequence[int], runs: int, folder: Path | None) -> Costs:
    with tempfile.TemporaryDirectory(prefix="millrace-delta-", dir=folder) as home:
        settings = DeltaSettings(path=f"{home}/lake", maintain_minutes=0)
        sink = delta.open_sink(settings, SinkContext(Path(home)))
        sink.prepare(TABLE)
        filled("delta", rows, partial(load, sink))
        return costs(sink, rows, batches, runs)


def load(sink: delta.DeltaSink, rows: int) -> None:
    """Write rows in key order, with the same result as the sink but without JSON."""
    layout = new_layout(TABLE)
    for start in range(0, rows, _CHUNK):
        ids = np.arange(start, min(rows, start + _CHUNK))
        size = target_size(rows * _BYTES_A_ROW)
        write_deltalake(
            sink.store(TABLE.table).current(),
            _rows(ids, layout.arrow),
            mode="append",
            target_file_size=size,
            writer_properties=layout.encodings,
        )


def _rows(ids: Ints, schema: pa.Schema) -> pa.Table:
    columns = values(ids)
    columns["amount"] = pc.cast(pc.cast(columns["amount"], pa.decimal128(21, 2)), pa.decimal128(12, 2))
    same: dict[str, Any] = {
        "updated_at": pa.scalar(WHEN),
        VERSION: pa.scalar(100, pa.int64()),
        DELETED: pa.scalar(False),
        COMMITTED: pa.scalar(WHEN),
    }
    columns |= {name: pa.repeat(value, len(ids)) for name, value in same.items()}
    return pa.table(columns).cast(schema)


def main() -> None:
    """Print the costs as JSON: python -m bench.sinks.delta_batches [largest table]."""
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    tables = [rows for rows in (100_000, 1_000_000, 10_000_000) if rows <= largest]
    print(json.dumps(measure(tables, SIZES), indent=2))


if __name__ == "__main__":
    main()

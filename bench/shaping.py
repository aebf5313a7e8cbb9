"""The cost of shaping: CPU of this process in microseconds per row, by the size of a batch and what the shape has.

    python -m bench.shaping        (SIZES, RUNS, OUT from the environment)

Each figure is the median of some runs of the function that every sink with a shape calls for a batch; nothing is
written to a store. All rows meet the filter, so that none is cheaper.
"""

import os
import statistics
import time
from pathlib import Path

import numpy as np

from bench.comparison import RESULTS, machine, write
from bench.sinks.batches import TABLE, batch_of
from cdc.config.settings import TableShape
from cdc.ports import Batch
from sinks.shape.columns import shaped_columns
from sinks.shape.table import ShapedTable

SHAPES = {
    "rename": TableShape(rename={"note": "text"}),
    "filter": TableShape(where="status <> 'draft'"),
    "filter and computed column": TableShape(where="status <> 'draft'", compute={"total": "amount * customer"}),
    "filter and five computed columns": TableShape(
        where="status <> 'draft'",
        compute={
            "total": "amount * customer",
            "day": "date_trunc('day', updated_at)",
            "size": "case when amount > 100 then 'large' else 'small' end",
            "title": "upper(left(note, 10))",
            "odd": "customer % 2 = 1",
        },
    ),
    "hashed column": TableShape(mask={"note": "hash"}),
}


def measure(sizes: list[int], runs: int) -> dict[str, dict[str, float]]:
    """By shape and size of the batch."""
    found: dict[str, dict[str, float]] = {}
    for name, shape in SHAPES.items():
        table = ShapedTable(shaped_columns(shape, TABLE, "bench"), b"key")
        found[name] = {str(size): _cost(table, batch_of(np.arange(size), 1), runs) for size in sizes}
    return found


def _cost(table: ShapedTable, batch: Batch, runs: int) -> float:
    """Small batches are repeated within a run: the clock of a process is coarse."""
    repeats = max(1, 200 // batch.rows.num_rows)
    table.batch(batch)
    taken = []
    for _ in range(runs):
        begun = time.process_time()
        for _ in range(repeats):
            assert table.batch(batch).batch.rows.num_rows == batch.rows.num_rows
        taken.append((time.process_time() - begun) * 1e6 / repeats / batch.rows.num_rows)
    return round(statistics.median(taken), 2)


def main() -> None:
    """Measure, print, and write the results."""
    sizes = [int(size) for size in os.environ.get("SIZES", "1,10,1000,50000").split(",")]
    found = measure(sizes, int(os.environ.get("RUNS", "3")))
    for name, costs in found.items():
        print(f"{name:35}", "  ".join(f"{size}: {cost:.2f}" for size, cost in costs.items()))
    results = {"unit": "CPU us per row", "machine": machine(), "by_batch_size": found}
    write(Path(os.environ.get("OUT") or RESULTS / "shaping.json"), results)


if __name__ == "__main__":
    main()

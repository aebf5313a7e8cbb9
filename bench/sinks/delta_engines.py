"""The engines of a Delta sink compared: Millrace with deletion vectors, and Spark's MERGE with deletion vectors.

    python -m bench.sinks.delta_engines        (TABLES, BATCHES: numbers of rows, separated by commas)

Each engine gets a table of its own with the same rows, and batches of changes to random keys. CPU is that of this
process and of Spark's JVM together, with the C2 compiler, which suits long runs of large batches; the first batch of
each size is not counted. Results: bench/results/delta_engines.json.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import cpu_meter
from bench.comparison import RESULTS, machine, write
from bench.sinks.batches import TABLE, batch_of, filled
from bench.sinks.delta_batches import load
from cdc.artifacts.jars import spark_jars
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.settings import DeltaSettings
from sinks.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENGINES = ("native", "spark")
_C2 = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4", "spark.driver.memory": "3g"}

Figures = dict[str, float]


def measure(tables: Sequence[int], batches: Sequence[int], home: Path) -> dict[str, dict[str, Figures]]:
    """By rows of the table, changes of the batch and engine: seconds and CPU."""
    session = spark_session("bench", spark_jars(), {**_C2, "spark.local.dir": str(home)}, home)
    try:
        return {str(rows): _of_table(session, rows, batches, home) for rows in tables}
    finally:
        session.stop()


def _of_table(session: "SparkSession", rows: int, batches: Sequence[int], home: Path) -> dict[str, Figures]:
    versions, random = itertools.count(1_001), np.random.default_rng(7)
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(dir=home) as folder:
        sinks = {engine: _sink(engine, session, Path(folder), rows) for engine in ENGINES}
        for size in batches:
            found[str(size)] = {}
            for engine, sink in sinks.items():
                made = [batch_of(random.choice(rows, size, replace=False), next(versions)) for _ in range(2)]
                sink.apply(made[0])
                taken = _taken(partial(sink.apply, made[1]))
                found[str(size)] |= {f"{engine}_{name}": value for name, value in _per_change(taken, size).items()}
            print(rows, size, found[str(size)], flush=True)
    return found


def _sink(engine: str, session: "SparkSession", folder: Path, rows: int) -> delta.DeltaSink:
    settings = DeltaSettings.model_validate({"path": str(folder / engine), "engine": engine, "maintain_minutes": 0})
    sink = delta.open_sink(settings, SinkContext(folder, lambda: session))
    sink.prepare(TABLE)
    filled(engine, rows, partial(load, sink))
    return sink


def _taken(action: Callable[[], None]) -> tuple[float, float]:
    begun, used = time.monotonic(), cpu_meter.tree_cpu(os.getpid())
    action()
    return time.monotonic() - begun, cpu_meter.tree_cpu(os.getpid()) - used


def _per_change(taken: tuple[float, float], size: int) -> dict[str, float]:
    seconds, cpu = taken
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "cpu_us_per_change": round(cpu / size * 1e6, 1)}


def main() -> None:
    """Measure and write the results."""
    tables, batches = _numbers("TABLES", "1000000,10000000"), _numbers("BATCHES", "1000,100000,1000000")
    with tempfile.TemporaryDirectory(prefix="millrace-engines-") as home:
        found: dict[str, Any] = {"machine": machine(), "tables": measure(tables, batches, Path(home))}
    write(RESULTS / "delta_engines.json", found)


def _numbers(name: str, default: str) -> list[int]:
    return [int(number) for number in os.environ.get(name, default).split(",")]


if __name__ == "__main__":
    main()

"""`verify` of one table in each store: rows a second, and the CPU of this process, the store and the source for a row.

The stores hold what the sinks would have left there (bench.fill), equal to the source: that is the case that counts,
since verify reads everything to prove it. The rate is of the whole comparison, from the first look at the source.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import cpu_meter
from bench.comparison import RESULTS, machine, medians, write
from bench.environment import Database, Workspace, benchmark_postgres, workspace
from bench.sinks import delta_batches
from bench.sinks.batches import TABLE
from bench.sinks.store_batches import STORES
from cdc.config.settings import SourceSettings, TableSettings
from cdc.ports import Sink
from sinks.context import SinkContext
from sinks.delta import sink as delta
from snapshots.verify.comparison import verify_table

Figures = dict[str, float]
NAMES = ("delta", "redis", "opensearch")

_SOURCE = (
    "create schema bench",
    "create table bench.orders (id bigint primary key, customer bigint, amount numeric(12,2), status text, note text,"
    " updated_at timestamptz)",
)
_FILL = (
    "insert into bench.orders select g, g * 7919 % 100003, g * 31 % 10000,"
    " (array['open', 'paid', 'sent', 'done'])[g % 4 + 1], 'order of ' || (g * 104729 % 1000003) || ' with a remark',"
    " '2026-03-01 12:00:00+00' from generate_series(0, {last}::bigint) g"
)


@dataclass(frozen=True, slots=True)
class Filled:
    """A filled store; `server` returns the CPU seconds of its server, if it has one."""

    sink: Sink
    server: Callable[[], float] | None


@contextmanager
def _filled(name: str, space: Workspace, rows: int) -> Iterator[Filled]:
    if name == "delta":
        settings = delta.DeltaSettings(path=str(space.home / "lake"), maintain_minutes=0)
        lake = delta.open_sink(settings, SinkContext(space.home))
        lake.prepare(TABLE)
        delta_batches.load(lake, rows)
        yield Filled(lake, None)
        lake.close()
        return
    running = space.up(name)[name]
    opened = STORES[name].open(running.address)
    opened.sink.prepare(TABLE)
    opened.fill(rows)
    yield Filled(opened.sink, partial(cpu_meter.cpu_seconds, running.pid))
    opened.sink.close()


def run(names: tuple[str, ...], rows: int, runs: int) -> dict[str, object]:
    """Measure every store, one after the other, and take the median of each figure."""
    stores: dict[str, Figures] = {}
    with workspace("verify", benchmark_postgres(), *(store.server for store in STORES.values())) as space:
        space.up("postgres")
        database = space.database()
        database.execute(*_SOURCE, _FILL.format(last=rows - 1), "vacuum analyze bench.orders", "checkpoint")
        for name in names:
            with _filled(name, space, rows) as store:
                turns = [_measured(store, space, database, rows) for _ in range(runs)]
            stores[name] = medians(turns)
            print(f"{name:12} {json.dumps(stores[name])}", flush=True)
    source = [figures.pop("source_cpu_us_per_row") for figures in stores.values()]
    return {"rows": rows, "runs": runs, "machine": machine(), "stores": stores, "source_cpu_us_per_row": max(source)}


def _measured(store: Filled, space: Workspace, database: Database, rows: int) -> Figures:
    postgres = space.up("postgres")["postgres"].pid
    source = SourceSettings.model_validate({**database.source, "tables": [str(TABLE.table)]})
    clocks: Mapping[str, Callable[[], float]] = {
        "cpu_us_per_row": time.process_time,
        "source_cpu_us_per_row": partial(cpu_meter.tree_cpu, postgres),
        **({"server_cpu_us_per_row": store.server} if store.server else {}),
    }
    load, before, begun = cpu_meter.load(), [clock() for clock in clocks.values()], time.monotonic()
    found = verify_table(source, TableSettings(name=TABLE.table), store.sink)
    seconds = time.monotonic() - begun
    used = [clock() - then for clock, then in zip(clocks.values(), before, strict=True)]
    if not found.equal or found.undecided or found.rows != rows:
        raise RuntimeError(f"{store.sink.name} differs from the source: {found.facts()}")
    figures = {name: round(cpu / rows * 1e6, 2) for name, cpu in zip(clocks, used, strict=True)}
    return {"rows_per_s": round(rows / seconds), **figures, "load": load}


def main() -> None:
    """Print a line for each store and write the results: ROWS, RUNS, STORES (with commas), OUT."""
    names = tuple(filter(None, os.environ.get("STORES", "").split(","))) or NAMES
    results = run(names, int(os.environ.get("ROWS", "500000")), int(os.environ.get("RUNS", "3")))
    if out := os.environ.get("OUT"):
        write(Path(out), results)
    elif names == NAMES:
        write(RESULTS / "verify.json", results)


if __name__ == "__main__":
    main()

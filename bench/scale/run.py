"""What a cluster carries, and what it costs: `make bench-scale` writes bench/results/scale.json.

    python -m bench.scale.run        (CHANGES, KEYS, TABLES, BEFORE, RUNS, PARTS, OUT from the environment)

`cluster`: CHANGES changes of a segment log into each store by tasks of a standalone cluster, with the CPU of the driver
(its Python, its JVM) and of the executors. `latency_bound`: the same into stores whose requests take 20 ms longer, with
small requests, so that waiting is the limit and not the cores of this machine; by the number of tasks. `idle_tables`:
a pipeline with TABLES tables, of which none changes: start, memory, CPU, beside one with ten tables. `local`: what
`local[2]` does in this checkout and, if BEFORE names another one, there, RUNS times in turns: medians. Parts that PARTS
does not name keep their results.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import cpu_meter
from bench.comparison import RESULTS, machine, medians, write
from bench.scale.cluster import ClusterEnvironment, catch_up, cluster_environment, fill_log
from bench.scale.delay_proxy import delayed
from bench.scale.idle_tables import idle_tables

Figures = dict[str, Any]
_DELAY = 0.02
_TASKS = (1, 2, 4, 8)
_BOUND_BATCH = {"redis": 20_000, "opensearch": 6_000}
"""Changes of a batch for each task of a latency-bound run: ten seconds of waiting."""
_BOUND_BATCHES = 4
"""The first does not count."""
_LOCAL = {"PARTS": "throughput latency", "ROWS": "50000", "CHANGES": "200000", "SECONDS": "20"}


def _number(name: str, usual: int) -> int:
    return int(os.environ.get(name, usual))


def cluster() -> Figures:
    """Where the CPU of a catch-up goes: into Redis, and beside it into each other store."""
    found: Figures = {}
    with cluster_environment(1) as environment:
        for store in ("redis", "delta", "opensearch"):
            folder = environment.place.home / f"cluster-{store}"
            end = fill_log(folder / "state", _number("CHANGES", 2_000_000), _number("KEYS", 2_000_000))
            sections: dict[str, Figures] = {
                "redis": {"url": environment.servers["redis"].address},
                "opensearch": {"url": environment.servers["opensearch"].address, "replicas": 0},
                "delta": {"path": str(folder / "lake")},
            }
            section = {"kind": store, "name": store, **sections[store]}
            found[store] = catch_up(environment, folder, section, 2, end).figures()
            print(store, found[store], flush=True)
            _remove(folder)
    return {"store": "redis", **found.pop("redis"), "others": found}


def latency_bound() -> Figures:
    """Changes a second by the number of tasks, with slow answers."""
    found: Figures = {"redis": {}, "opensearch": {}}
    with cluster_environment(max(_TASKS) // 2) as environment:
        for store in found:
            with delayed(store, environment.servers[store].port, _DELAY) as port:
                for tasks in _TASKS:
                    rate = _bound(environment, store, port, tasks)
                    of_one = found[store].get("1", {"changes_per_s": rate})["changes_per_s"]
                    figures = {"changes_per_s": rate, "of_one_task": round(rate / of_one, 2), "load": cpu_meter.load()}
                    found[store][str(tasks)] = figures
                    print(store, tasks, figures, flush=True)
    return found


def _bound(environment: ClusterEnvironment, store: str, port: int, tasks: int) -> int:
    """Small requests: a task waits for the store most of the time."""
    name = f"{store}-{tasks}"
    folder = environment.place.home / name
    batch = _BOUND_BATCH[store] * tasks
    end = fill_log(folder / "state", batch * _BOUND_BATCHES)
    own: dict[str, Any] = {
        "redis": {"url": f"redis://127.0.0.1:{port}", "prefix": f"{name}:", "chunk": 20},
        "opensearch": {"url": f"http://127.0.0.1:{port}", "prefix": f"{name}-", "replicas": 0, "bulk_mb": 0.003},
    }[store]
    section = {"kind": store, "name": store, **own, "max_batch_changes": batch}
    run = catch_up(environment, folder, section, tasks, end)
    _remove(folder)
    return run.rate


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # the JVM removes its own files at the same time


def local() -> Figures:
    """`local[2]` here and in the checkout BEFORE, in turns: one run of a build differs from the next by a quarter."""
    checkouts = {"after": Path.cwd()}
    if before := os.environ.get("BEFORE"):
        checkouts = {"before": Path(before), **checkouts}
    turns = [{name: _local(checkout) for name, checkout in checkouts.items()} for _ in range(_number("RUNS", 3))]
    return {name: {"runs": len(turns), **medians([turn[name] for turn in turns])} for name in checkouts}


def _local(checkout: Path) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sinks.json"
        python = checkout / ".venv" / "bin" / "python"
        environment = {**os.environ, **_LOCAL, "OUT": str(out)}
        command = [str(python) if python.exists() else sys.executable, "-m", "bench.sinks.run"]
        subprocess.run(command, cwd=checkout, env=environment, check=True, timeout=3600)
        found: Figures = json.loads(out.read_text(encoding="utf-8"))
        return found


PARTS: dict[str, Callable[[], Figures]] = {
    "cluster": cluster,
    "latency_bound": latency_bound,
    "idle_tables": lambda: idle_tables(_number("TABLES", 1_000)),
    "local": local,
}


def main() -> None:
    """Measure the chosen parts, and write the results after each."""
    path = Path(os.environ.get("OUT") or RESULTS / "scale.json")
    results: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in os.environ.get("PARTS", " ".join(PARTS)).split():
        results[name] = PARTS[name]()
        results["measured"] = {**results.get("measured", {}), name: {**machine(), "load": cpu_meter.load()}}
        write(path, results)
        print(json.dumps({name: results[name]}, indent=1), flush=True)


if __name__ == "__main__":
    main()

"""From the log into the stores: throughput, CPU and latency, compared with consumers as people usually write them.

    python -m bench.sinks.run        (ROWS, CHANGES, PEER_CHANGES, SECONDS, TABLES, PARTS from the environment)

`throughput`: a Kafka log has a snapshot of ROWS rows and then CHANGES changes; each store alone and all three together
apply it from the beginning. Changes after the first batch that has any are counted, so neither the start of the JVM nor
the snapshot is in the figures. `peers`: plain consumers apply the same changes from the same topics. `latency`: from a
commit in Postgres to the sink's position, which follows the store's answer, at 100 and 500 one-row transactions a
second, with all stores and the segment log. `batches`: the cost of one batch in a small and in a large table. CPU is
that of all Millrace processes. Parts that PARTS does not name keep their results. OUT names another file for the
results.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench import cpu_meter, workload
from bench.capture.watchers import TopicEnd
from bench.comparison import RESULTS, machine, write
from bench.sinks import delta_batches, store_batches
from bench.sinks.batches import SIZES
from bench.sinks.pipeline import STORES, Pipeline, Positions, SinkEnvironment, Step, sink_environment
from bench.workload import TABLE
from cdc.model import Lsn
from cdc.ports import LogReader

_RATES = (100, 500)
_WARM_UP = 10.0
"""Seconds of the same load before the measured ones: the JVM compiles, tables are created."""
_USED = {
    "throughput": ("rows", "changes"),
    "peers": ("peer_changes",),
    "latency": ("rows", "seconds"),
    "batches": ("tables",),
}
"""The parts, and the fields of `Sizes` that each uses."""
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The amount of work."""

    rows: int
    changes: int
    peer_changes: int
    seconds: float
    tables: tuple[int, ...]

    @classmethod
    def from_environment(cls) -> "Sizes":
        """From the environment."""
        variable = os.environ.get
        return cls(
            int(variable("ROWS", "200000")),
            int(variable("CHANGES", "500000")),
            int(variable("PEER_CHANGES", "20000")),
            float(variable("SECONDS", "30")),
            tuple(map(int, variable("TABLES", "100000 10000000").replace(",", " ").split())),
        )


# -- throughput


def throughput(environment: SinkEnvironment, sizes: Sizes) -> tuple[dict[str, Figures], Mapping[str, Any]]:
    """Every store alone, then all together; also returns where plain consumers find the same changes."""
    pipeline = Pipeline(environment, "kafka", environment.home / "throughput")
    workload.load(environment.database.dsn, sizes.rows)
    pipeline.start("capture")
    try:
        snapshot = pipeline.captured()
        topic = f"bench.{TABLE}"
        bootstrap = environment.servers["kafka"].address
        offset = TopicEnd(bootstrap, topic).now()
        workload.churn(environment.database.dsn, sizes.changes, sizes.rows)
        target = pipeline.captured()
        found = {name: _folded(pipeline, kinds, snapshot, target) for name, kinds in _sink_sets().items()}
    finally:
        pipeline.end()
    return found, {"bootstrap": bootstrap, "topic": topic, "offset": offset}


def _sink_sets() -> dict[str, Sequence[str]]:
    return {**{store: (store,) for store in STORES}, "all": STORES}


def _folded(pipeline: Pipeline, kinds: Sequence[str], snapshot: int, target: int) -> Figures:
    sink_set = "-".join(kinds)
    names = [f"{kind}_{len(kinds)}" for kind in kinds]
    pipeline.sinks = [pipeline.environment.sink(kind, name) for kind, name in zip(kinds, names, strict=True)]
    log = pipeline.log()
    apply = pipeline.start("apply")
    with Positions(log, names) as positions:
        cpu_meter.wait(
            lambda: apply.alive() and any(_after(positions, snapshot)), f"the first batch of {sink_set}", 1800
        )
        cpu, store_cpu = apply.cpu(), pipeline.environment.store_cpu()
        cpu_meter.wait(lambda: apply.alive() and positions.reached() >= target, f"{sink_set} to catch up", 3600)
        cpu, store_cpu = apply.cpu() - cpu, pipeline.environment.store_cpu() - store_cpu
    stopping = apply.end()
    each = {kind: _rate(log, positions.steps[name], snapshot) for kind, name in zip(kinds, names, strict=True)}
    changes = max(count for _, count in each.values())  # of the sink whose first batch started the measurement
    return {
        "changes_per_s": {kind: round(rate) for kind, (rate, _) in each.items()},
        "cpu_us_per_change": round(cpu / changes * 1e6, 1),
        "store_cpu_us_per_change": round(store_cpu / changes * 1e6, 1),
        "seconds_to_stop": round(stopping, 1),
        "load": cpu_meter.load(),
    }


def _after(positions: Positions, snapshot: int) -> list[bool]:
    return [bool(steps) and steps[-1].reached > snapshot for steps in positions.steps.values()]


def _rate(log: LogReader, steps: Sequence[Step], snapshot: int) -> tuple[float, int]:
    """Changes per second after the first batch that has changes, and their number."""
    first = next(step for step in steps if step.reached > snapshot)
    counted = sum(
        int(np.sum(piece.rows.column("commit_lsn").to_numpy() >= first.reached))
        for piece in log.read(log.seek(Lsn(first.reached)))
    )
    if not counted:
        raise RuntimeError("all changes came in one batch: ask for more CHANGES")
    return counted / (steps[-1].monotonic - first.monotonic), counted


def peers(environment: SinkEnvironment, topic: Mapping[str, Any], sizes: Sizes) -> dict[str, Figures]:
    """Run each plain consumer in its own process, one after the other."""
    found = {}
    for name in STORES:
        own = {"url": "" if name == "delta" else environment.servers[name].address, "folder": str(environment.home)}
        settings = {**topic, **own, "changes": min(sizes.peer_changes, sizes.changes)}
        command = [sys.executable, "-m", "bench.sinks.plain_consumers", name, "--settings", json.dumps(settings)]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=3600).stdout
        found[name] = {key: round(value, 1) for key, value in json.loads(answer.splitlines()[-1]).items()}
    return found


# -- latency


def latency(environment: SinkEnvironment, sizes: Sizes) -> Figures:
    """With all stores: from commit to applied, and the time from the start of the process to the first rows."""
    workload.load(environment.database.dsn, sizes.rows)
    sinks = [environment.sink(store, f"{store}_steady") for store in STORES]
    names = [sink["name"] for sink in sinks]
    pipeline = Pipeline(environment, "segments", environment.home / "latency", sinks)
    pipeline.start("capture")
    try:
        loaded, log = pipeline.captured(), pipeline.log()
        begun = time.monotonic()
        apply = pipeline.start("apply")
        with Positions(log, names) as positions:
            cpu_meter.wait(lambda: apply.alive() and positions.reached() >= loaded, "the first rows", 900)
            first = {name: round(steps[0].monotonic - begun, 1) for name, steps in positions.steps.items()}
            rates = {}
            for tps in _RATES:
                workload.steady(environment.database.dsn, tps, min(_WARM_UP, sizes.seconds), sizes.rows)
                rates[str(tps)] = _steady(pipeline, apply.cpu, positions, tps, sizes)
        return {"seconds_to_first_row": first, "tx_per_s": rates, "seconds_to_stop": round(apply.end(), 1)}
    finally:
        pipeline.end()


def _steady(pipeline: Pipeline, cpu: Callable[[], float], positions: Positions, tps: float, sizes: Sizes) -> Figures:
    begun, wall, used = time.monotonic(), time.time(), cpu()
    done = workload.steady(pipeline.environment.database.dsn, tps, sizes.seconds, sizes.rows)
    used, seconds = cpu() - used, time.monotonic() - begun
    target = pipeline.captured()
    cpu_meter.wait(lambda: positions.reached() >= target, "the last changes", 300)
    ages = {name: _ages(pipeline.log(), steps, wall) for name, steps in positions.steps.items()}
    return {
        "latency_ms": {name.removesuffix("_steady"): cpu_meter.percentiles(each) for name, each in ages.items()},
        "cores": round(used / seconds, 2),
        "workload_late_s": round(done.lateness, 3),
        "load": cpu_meter.load(),
    }


def _ages(log: LogReader, steps: Sequence[Step], since: float) -> list[float]:
    """For every change since a time: the seconds from its commit to the first position after it."""
    start = log.seek(datetime.fromtimestamp(since, UTC))
    rows = pa.concat_tables([piece.rows.select(["commit_lsn", "commit_ts"]) for piece in log.read(start)])
    committed = rows.column("commit_ts").cast(pa.int64()).to_numpy() / 1e6
    recent = committed >= since
    reached = np.array([step.reached for step in steps])
    at = np.searchsorted(reached, rows.column("commit_lsn").to_numpy()[recent], side="right")
    walls = np.array([step.wall for step in steps])
    ages: list[float] = (walls[at] - committed[recent]).tolist()
    return ages


# -- all parts


def run() -> Figures:
    """Measure the parts that PARTS names; all by default."""
    sizes, wanted = Sizes.from_environment(), os.environ.get("PARTS", " ".join(_USED)).split()
    found: Figures = {"workload": {name: getattr(sizes, name) for part in wanted for name in _USED[part]}}
    if "batches" in wanted:
        lake = delta_batches.measure(sizes.tables, SIZES)
        found["batches"] = {"delta": lake, **store_batches.measure(sizes.tables, SIZES)}
    if {"throughput", "latency"} & set(wanted):
        found |= _staged(sizes, wanted)
    told = {**machine(), "load": cpu_meter.load()}
    return {**found, "measured": dict.fromkeys(wanted, told)}


def _staged(sizes: Sizes, wanted: Sequence[str]) -> Figures:
    """The parts that need a database."""
    found: Figures = {}
    with sink_environment(kafka="throughput" in wanted) as environment:
        if "throughput" in wanted:
            found["throughput"], topic = throughput(environment, sizes)
            print(json.dumps(found["throughput"]), flush=True)
            if "peers" in wanted:
                found["peers"] = peers(environment, topic, sizes)
                found["ratios"] = ratios(found["throughput"], found["peers"])
        if "latency" in wanted:
            found["latency"] = latency(environment, sizes)
    return found


def with_earlier(found: Figures, path: Path) -> Figures:
    """The new results, and those of an earlier run for parts that were not measured."""
    earlier: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    told = {name: {**earlier.get(name, {}), **found[name]} for name in ("workload", "measured")}
    return {**earlier, **found, **told}


def ratios(ours: Mapping[str, Figures], theirs: Mapping[str, Figures]) -> dict[str, Figures]:
    """Speed and CPU relative to the plain consumer of each store."""
    return {
        store: {
            "speed": round(ours[store]["changes_per_s"][store] / theirs[store]["changes_per_s"], 1),
            "cpu": round(theirs[store]["cpu_us_per_change"] / ours[store]["cpu_us_per_change"], 1),
        }
        for store in STORES
    }


def shown(found: Mapping[str, Any]) -> list[str]:
    """The results as lines of a table."""
    lines = []
    if "throughput" in found:
        lines.append(
            f"{'store':12}{'changes/s':>12}{'of three':>12}{'peer':>10}{'ratio':>8}{'µs CPU':>10}{'peer µs':>10}"
        )
        lines += [_line(found, store) for store in STORES]
        lines.append(f"{'all three':12}{'':>44}{found['throughput']['all']['cpu_us_per_change']:>18}")
    for tps, figures in found.get("latency", {}).get("tx_per_s", {}).items():
        ages = ", ".join(f"{store} {at['p50']:.0f}/{at['p99']:.0f}" for store, at in figures["latency_ms"].items())
        lines.append(f"{tps} tx/s, p50/p99 ms: {ages}; {figures['cores']} cores")
    for store, tables in found.get("batches", {}).items():
        for rows, costs in tables.items():
            spread = ", ".join(f"{changes}: {each['seconds']} s" for changes, each in costs["spread"].items())
            lines.append(f"{store}, {rows} rows, a batch of so many changes all over them: {spread}")
    return lines


def _line(found: Mapping[str, Any], store: str) -> str:
    alone, peer = found["throughput"][store], found.get("peers", {}).get(store, {})
    together = found["throughput"]["all"]["changes_per_s"][store]
    ratio = found.get("ratios", {}).get(store, {}).get("speed", "")
    return (
        f"{store:12}{alone['changes_per_s'][store]:>12}{together:>12}{peer.get('changes_per_s', ''):>10}{ratio:>8}"
        f"{alone['cpu_us_per_change']:>10}{peer.get('cpu_us_per_change', ''):>10}"
    )


def main() -> None:
    """Print a table and write the results."""
    path = Path(os.environ.get("OUT") or RESULTS / "sinks.json")
    results = with_earlier(run(), path)
    write(path, results)
    print("\n".join(shown(results)))


if __name__ == "__main__":
    main()

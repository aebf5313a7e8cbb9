"""Views: whether they are right, what they cost, and what other programs do with the same changes.

    python -m bench.views.run
        (KINDS, CONTENDERS, PARTS, TRANSACTIONS, SCALE, CHANGES, SECONDS, RATE, OUT from the environment)

`make bench-views` writes bench/results/views.json. `consistency`: see `bench.views.consistency`. `kinds`: for each of
`bench.views.workloads`, a loaded state of SCALE times ten thousand rows, then a backlog of CHANGES changes, then RATE
transactions a second for SECONDS. Events are changes of the source. Throughput and CPU are counted from the end of the
first batch to that of the last; CPU is that of the process that computes the view and of its children. Latency is the
time from the commit to the result in the log or in the topic of results. Peers read topics of the same changes with
Debezium's envelope, Millrace the segment log. What a peer cannot express is in `cannot`. Kinds and peers that are not
measured keep their results.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bench import cpu_meter
from bench.comparison import RESULTS, machine, write
from bench.sinks.pipeline import SinkEnvironment
from bench.views import consistency, millrace, quix, structured
from bench.views.peers import PEERS, Arrivals, Peer, TopicArrivals, create_topic, figures
from bench.views.place import ViewPipeline, view_environment
from bench.views.workloads import WORKLOADS, Workload
from cdc.arrays import Ints
from cdc.ports import LogReader

_LIMITS: Mapping[str, Mapping[str, str]] = {"structured_streaming": structured.LIMITS, "quix_streams": quix.LIMITS}
MILLRACE = "millrace"
_WARM_SECONDS = 10.0
_BATCHES = 10
"""Micro-batches of a topic's backlog; as many changes as in those of Millrace, if there are 200,000."""
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The amount of work of each kind."""

    scale: int
    changes: int
    seconds: float
    rate: float

    @classmethod
    def from_environment(cls) -> "Sizes":
        """SCALE, CHANGES, SECONDS, RATE."""
        variable = os.environ.get
        return cls(
            int(variable("SCALE", "10")),
            int(variable("CHANGES", "200000")),
            float(variable("SECONDS", "30")),
            float(variable("RATE", "200")),
        )


def peers(environment: SinkEnvironment, workload: Workload, sizes: Sizes, names: Sequence[str]) -> Figures:
    """Each peer on the same topics."""
    dsn, bootstrap = environment.database.dsn, environment.servers["kafka"].address
    workload.create(dsn, sizes.scale)
    home = environment.home / f"peers-{workload.name}"
    pipeline = ViewPipeline(environment, "kafka", home, tables=workload.tables, prefix=f"bench_{workload.name}")
    pipeline.start("capture")
    with ExitStack() as stack:
        stack.callback(environment.database.drop_stream, "bench_kafka")
        stack.callback(pipeline.end)
        pipeline.captured()
        running = {}
        for name in names:
            topic = f"{workload.name}-{name}"
            create_topic(bootstrap, topic)
            own = {"kind": workload.name, "bootstrap": bootstrap, "topics": pipeline.topics, "out": topic}
            own |= {"home": str(home / name), "limit": str(max(1_000, sizes.changes // _BATCHES))}
            running[name] = stack.enter_context(Peer(name, own, home / f"{name}.log"))
            running[name].ask("catch_up")
        changes = _churned(pipeline, workload, dsn, sizes)
        found = {name: figures(changes, peer.ask("catch_up")) for name, peer in running.items()}
        for seed, (name, peer) in enumerate(running.items(), 2):
            peer.ask("live")
            arrivals = TopicArrivals(bootstrap, f"{workload.name}-{name}")
            found[name] |= latency(pipeline, workload, sizes, arrivals, seed)
            peer.say("stop")
            found[name]["cannot"] = _LIMITS[name][workload.name]
    return found


def _churned(pipeline: ViewPipeline, workload: Workload, dsn: str, sizes: Sizes) -> int:
    """Make the backlog; returns how many changes the log has of it."""
    log, wall = pipeline.log(), time.time()
    workload.churn(dsn, sizes.changes, sizes.scale, 1)
    pipeline.captured()
    return len(_commits(log, wall, workload.tables))


def _commits(log: LogReader, since: float, tables: Sequence[str]) -> list[int]:
    """The commit time, in microseconds, of every change of these tables since a time."""
    names = pa.array(list(tables))
    found: list[int] = []
    for piece in log.read(log.seek(datetime.fromtimestamp(since, UTC))):
        rows = piece.rows.filter(pc.is_in(piece.rows["table"], value_set=names))
        times: Ints = rows["commit_ts"].cast(pa.int64()).to_numpy()
        found += times[times >= since * 1e6].tolist()
    return found


def latency(pipeline: ViewPipeline, workload: Workload, sizes: Sizes, arrivals: Arrivals, seed: int) -> Figures:
    """At the steady rate, after some seconds of it that are not counted."""
    dsn = pipeline.environment.database.dsn
    with arrivals:
        workload.commit_steadily(dsn, sizes.rate, min(_WARM_SECONDS, sizes.seconds), sizes.scale, 100 * seed)
        since = time.time()
        late = workload.commit_steadily(dsn, sizes.rate, sizes.seconds, sizes.scale, 100 * seed + 50)
        pipeline.captured()
        commits = _commits(pipeline.log(), since, workload.tables)
        cpu_meter.wait(lambda: arrivals.reached() >= max(commits), "the last results", 300)
    ages = arrivals.ages(commits)
    return {"latency_ms": cpu_meter.percentiles(ages), "workload_late_s": round(late, 3)}


def own_view(environment: SinkEnvironment, workload: Workload, sizes: Sizes) -> Figures:
    """Millrace, over the segment log."""
    dsn = environment.database.dsn
    workload.create(dsn, sizes.scale)
    pipeline = millrace.pipeline_of(environment, workload)
    with ExitStack() as stack:
        stack.callback(environment.database.drop_stream, "bench_segments")
        stack.callback(pipeline.end)
        found = millrace.catch_up(pipeline, workload, lambda: _churned(pipeline, workload, dsn, sizes))
        arrivals = millrace.LogArrivals(pipeline.log(), workload.view["name"])
        found |= latency(pipeline, workload, sizes, arrivals, 9)
        if workload.view["kind"] == "documents":
            found |= millrace.into_opensearch(pipeline, workload, sizes.scale, sizes.rate, sizes.seconds)
    return found


def kinds(sizes: Sizes, chosen: Sequence[Workload], names: Sequence[str]) -> Figures:
    """By kind."""
    found: Figures = {}
    own = MILLRACE in names
    with view_environment(opensearch=own) as environment:
        for workload in chosen:
            each = own_view(environment, workload, sizes) if own else {}
            if others := [name for name in names if name != MILLRACE]:
                each["peers"] = peers(environment, workload, sizes, others)
            found[workload.name] = each
            print(workload.name, json.dumps(each), flush=True)
    return found


def merged(earlier: Figures, found: Figures) -> Figures:
    """The new figures over the earlier ones, at any depth."""
    both = {
        name: merged(earlier[name], value) if isinstance(value, dict) and isinstance(earlier.get(name), dict) else value
        for name, value in found.items()
    }
    return {**earlier, **both}


def main() -> None:
    """Measure the chosen parts, and write the results after each."""
    path = Path(os.environ.get("OUT") or RESULTS / "views.json")
    parts = os.environ.get("PARTS", "consistency kinds").split()
    if "consistency" in parts:
        consistency.main()
    if "kinds" in parts:
        sizes, variable = Sizes.from_environment(), os.environ.get
        wanted = variable("KINDS", " ".join(each.name for each in WORKLOADS)).split()
        names = variable("CONTENDERS", " ".join((MILLRACE, *PEERS))).split()
        found = {"kinds": kinds(sizes, [each for each in WORKLOADS if each.name in wanted], names)}
        earlier: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        told = {**machine(), "load": cpu_meter.load(), "scale": sizes.scale, "changes": sizes.changes}
        write(path, {**merged(earlier, found), "measured": told})


if __name__ == "__main__":
    main()

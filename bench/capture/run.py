"""From the WAL into a log, compared on the same work: pg_recvlogical, Millrace with both logs, Debezium.

    python -m bench.capture.run        (ROWS, CHANGES, SECONDS, TPS, CONTENDERS, OUT from the environment)

Each contender gets a freshly loaded table, a backlog of CHANGES row changes to catch up with, and then TPS one-row
transactions a second for SECONDS. Rate and CPU are counted from the start of the contender's WAL sender, as reported by
the server, until the last change is durable: the start of a process or JVM does not count. CPU is that of the
contender's own process, without broker and server; `busy_cores` is the CPU use of the whole machine.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

import psycopg

from bench import cpu_meter, workload
from bench.capture.contender import Contender, Throughput
from bench.capture.millrace import Millrace
from bench.capture.other_tools import Debezium, RecvLogical
from bench.comparison import Comparison
from bench.environment import Database, Workspace, benchmark_postgres, workspace
from bench.workload import Churned
from deploy.local.connect import Connect
from deploy.local.kafka import Kafka

COMPARISON = Comparison(
    "capture", ("pg_recvlogical", "millrace_segments", "millrace_kafka", "debezium_kafka"), "pg_recvlogical", "change"
)
_WARM_UP = 5.0
"""Seconds of the steady phase that are not counted."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work each contender gets."""

    rows: int = 1_000_000
    changes: int = 500_000
    seconds: float = 40.0
    tps: float = 500.0

    @classmethod
    def from_environment(cls) -> Self:
        """ROWS, CHANGES, SECONDS, TPS."""
        given = {item.name: os.environ.get(item.name.upper()) for item in fields(cls)}
        usual = cls()
        return cls(**{name: type(getattr(usual, name))(text) for name, text in given.items() if text})


_SENDER = """
select extract(epoch from r.backend_start)::float8
  from pg_replication_slots s join pg_stat_replication r on r.pid = s.active_pid where s.slot_name = %s
"""


def catch_up(contender: Contender, dsn: str, churned: Churned, target: int) -> Throughput:
    """Measure from the start of the contender's WAL sender, as reported by the server, until the last change is
    durable. The start of a process or a JVM does not count.
    """
    contender.resume(target)
    begun, cpu, busy = stream_start(contender, dsn)
    cpu_meter.wait(lambda: contender.reached(churned, target), f"{contender.name} to catch up", 1800, 0.01)
    seconds, used, worked = time.time() - begun, contender.cpu() - cpu, cpu_meter.busy_seconds() - busy
    contender.check(churned)
    changes = churned.changes
    return Throughput(changes / seconds, used / changes * 1e6, seconds, used / seconds, worked / seconds)


def stream_start(contender: Contender, dsn: str) -> tuple[float, float, float]:
    """When the WAL sender started, and how much CPU the contender and the whole machine had used by then."""
    seen = [(time.time(), contender.cpu(), cpu_meter.busy_seconds())]
    with psycopg.connect(dsn, autocommit=True) as connection:

        def sender() -> tuple[float] | None:
            seen.append((time.time(), contender.cpu(), cpu_meter.busy_seconds()))
            found: tuple[float] | None = connection.execute(_SENDER, (contender.slot,)).fetchone()
            return found

        cpu_meter.wait(sender, f"{contender.name} to ask for its stream", 120, 0.002)
        row = connection.execute(_SENDER, (contender.slot,)).fetchone()
    begun = row[0] if row else seen[-1][0]
    _, cpu, busy = max((each for each in seen if each[0] <= begun), default=seen[0])
    return begun, cpu, busy


def measure(contender: Contender, database: Database, sizes: Sizes) -> dict[str, object]:
    """Measure one contender on a new table."""
    dsn = database.dsn
    workload.load(dsn, sizes.rows)
    contender.begin()
    churned = workload.churn(dsn, sizes.changes, sizes.rows)
    before = cpu_meter.load()
    speed = catch_up(contender, dsn, churned, database.wal_end())
    contender.watch()
    busy = cpu_meter.busy_seconds()
    done = workload.steady(dsn, sizes.tps, sizes.seconds, sizes.rows)
    steady = (cpu_meter.busy_seconds() - busy) / done.seconds
    ages, peak = contender.latencies(done.transactions), contender.peak_rss_mb()
    contender.finish()
    warm = ages[int(min(_WARM_UP, sizes.seconds / 4) * sizes.tps) :]
    return {
        "changes_per_s": round(speed.changes_per_s),
        "cpu_us_per_change": round(speed.cpu_us_per_change, 1),
        "peak_rss_mb": peak,
        "latency_ms": cpu_meter.percentiles(warm),
        "load": {
            "before": before,
            "after": cpu_meter.load(),
            "seconds": round(speed.seconds, 2),
            "own_cores": round(speed.own_cores, 2),
            "busy_cores": round(speed.busy_cores, 2),
            "busy_cores_steady": round(steady, 2),
            "latest_s": round(done.lateness, 3),
        },
    }


def connect() -> Connect:
    """A worker that stores its positions every second."""
    return Connect({"offset.flush.interval.ms": "1000"})


def contenders(space: Workspace, database: Database) -> Mapping[str, Callable[[], Contender]]:
    """Functions that create the contenders: one at a time, so that no idle one uses CPU."""
    bootstrap = space.up("kafka")["kafka"].address
    topic = {"kind": "kafka", "bootstrap": bootstrap, "prefix": "bench_millrace", "partitions": 1}
    return {
        "pg_recvlogical": lambda: RecvLogical(database),
        "millrace_segments": lambda: Millrace("segments", database, {"kind": "segments"}, space.home / "segments"),
        "millrace_kafka": lambda: Millrace("kafka", database, topic, space.home / "kafka-log"),
        "debezium_kafka": lambda: Debezium(database, bootstrap, space.up("connect")["connect"]),
    }


def run(chosen: Sequence[str], sizes: Sizes) -> dict[str, object]:
    """Measure the chosen contenders one after the other."""
    found: dict[str, dict[str, object]] = {}
    with workspace("capture", benchmark_postgres(), Kafka(), connect()) as space:
        database = space.database()
        makers = contenders(space, database)
        for name in chosen:
            found[name] = measure(makers[name](), database, sizes)
            print(f"{name:18} {json.dumps(found[name])}", flush=True)
    return {"workload": asdict(sizes), "contenders": found}


def main() -> None:
    """Print a line for each and the ratios; write the results."""
    COMPARISON.run(lambda chosen: run(chosen, Sizes.from_environment()))


if __name__ == "__main__":
    main()

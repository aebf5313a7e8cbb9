"""From the WAL into a log, side by side on the same work: pg_recvlogical, Millrace twice, Debezium.

    python -m bench.capture        (ROWS, CHANGES, SECONDS, TPS, CONTENDERS, OUT from the environment)

Each contender gets a freshly loaded table, a backlog of CHANGES row changes to catch up with, and then TPS one-row
transactions a second for SECONDS. Rate and CPU are counted from the moment the contender asks for its stream (the
server says when its sender began) to the moment the last change is durable: process and JVM are then up, for all alike.
CPU is the contender's own process, without broker and server; `busy_cores` is what the whole machine worked meanwhile.
"""

import contextlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psycopg

from bench import meter, workload
from bench.millrace import Millrace, wal_end
from bench.peers import Debezium, RecvLogical, execute
from bench.rival import Rival, Throughput
from bench.workload import Churned
from deploy.local import postgres
from deploy.local.connect import Connect
from deploy.local.folders import cache_folder
from deploy.local.kafka import Kafka
from deploy.local.postgres import Postgres
from deploy.local.servers import Servers

RESULTS = Path(__file__).parent / "results" / "capture.json"
_POSTGRES = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min", "wal_compression": "off"}
_WARM_UP = 5.0
"""Seconds of the steady phase that are left out."""
NAMES = ("pg_recvlogical", "millrace_segments", "millrace_kafka", "debezium_kafka")


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


def catch_up(rival: Rival, dsn: str, churned: Churned, target: int) -> Throughput:
    """The same clock for all: from the moment the server began to serve the contender's stream, by its own word, to
    the moment the last change is durable. What a process did before (its start, a JVM's) counts for nobody.
    """
    rival.resume(target)
    begun, cpu, busy = asked(rival, dsn)
    meter.wait(lambda: rival.reached(churned, target), f"{rival.name} to catch up", 1800, 0.01)
    seconds, used, worked = time.time() - begun, rival.cpu() - cpu, meter.busy_seconds() - busy
    rival.check(churned)
    changes = churned.changes
    return Throughput(changes / seconds, used / changes * 1e6, seconds, used / seconds, worked / seconds)


def asked(rival: Rival, dsn: str) -> tuple[float, float, float]:
    """When the stream was asked for, and how much CPU the contender and the whole machine had used by then."""
    seen = [(time.time(), rival.cpu(), meter.busy_seconds())]
    with psycopg.connect(dsn, autocommit=True) as connection:

        def sender() -> tuple[float] | None:
            seen.append((time.time(), rival.cpu(), meter.busy_seconds()))
            found: tuple[float] | None = connection.execute(_SENDER, (rival.slot,)).fetchone()
            return found

        meter.wait(sender, f"{rival.name} to ask for its stream", 120, 0.002)
        row = connection.execute(_SENDER, (rival.slot,)).fetchone()
    begun = row[0] if row else seen[-1][0]
    _, cpu, busy = max((each for each in seen if each[0] <= begun), default=seen[0])
    return begun, cpu, busy


def measure(rival: Rival, dsn: str, sizes: Sizes) -> dict[str, object]:
    """One contender from a fresh table to its end."""
    workload.load(dsn, sizes.rows)
    rival.begin()
    churned = workload.churn(dsn, sizes.changes, sizes.rows)
    before = meter.load()
    speed = catch_up(rival, dsn, churned, wal_end(dsn))
    rival.watch()
    busy = meter.busy_seconds()
    done = workload.steady(dsn, sizes.tps, sizes.seconds, sizes.rows)
    steady = (meter.busy_seconds() - busy) / done.seconds
    ages, peak = rival.latencies(done.transactions), rival.peak_rss_mb()
    rival.finish()
    warm = ages[int(min(_WARM_UP, sizes.seconds / 4) * sizes.tps) :]
    return {
        "changes_per_s": round(speed.changes_per_s),
        "cpu_us_per_change": round(speed.cpu_us_per_change, 1),
        "peak_rss_mb": peak,
        "latency_ms": meter.percentiles(warm),
        "load": {
            "before": before,
            "after": meter.load(),
            "seconds": round(speed.seconds, 2),
            "own_cores": round(speed.own_cores, 2),
            "busy_cores": round(speed.busy_cores, 2),
            "busy_cores_steady": round(steady, 2),
            "latest_s": round(done.lateness, 3),
        },
    }


@contextlib.contextmanager
def servers(
    needed: Sequence[str] = ("postgres", "kafka"),
) -> Iterator[tuple[Servers, Mapping[str, Any], Path]]:
    """Postgres, Kafka and Connect of our own, gone afterwards; those that are `needed` are up."""
    base = cache_folder() / "bench"
    base.mkdir(mode=0o711, parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="capture-", dir=base))
    home.chmod(0o711)
    every = (Postgres(_POSTGRES), Kafka(), Connect({"offset.flush.interval.ms": "1000"}))
    own = Servers(home, {server.name: server for server in every}, tied=True)
    try:
        yield own, own.up(tuple(needed)), home
    finally:
        own.down()
        shutil.rmtree(home, ignore_errors=True)


def contenders(own: Servers, running: Mapping[str, Any], home: Path) -> Mapping[str, Callable[[], Rival]]:
    """Made one after the other, so that no idle one takes CPU from another."""
    database = running["postgres"]
    dsn = postgres.dsn(database.port, postgres.passfile(own.private()), "bench")
    secret = postgres.password(own.private()).reveal()
    source = {"host": database.host, "port": database.port, "database": "bench", "user": "postgres", "password": secret}
    bootstrap = running["kafka"].address
    topic = {"kind": "kafka", "bootstrap": bootstrap, "prefix": "bench_millrace", "partitions": 1}

    def debezium() -> Rival:
        worker = own.up(("connect",))["connect"]
        return Debezium(dsn, source, bootstrap, worker.address, worker.pid)

    return {
        "pg_recvlogical": lambda: RecvLogical(dsn),
        "millrace_segments": lambda: Millrace("segments", dsn, source, {"kind": "segments"}, home / "segments"),
        "millrace_kafka": lambda: Millrace("kafka", dsn, source, topic, home / "kafka-log"),
        "debezium_kafka": debezium,
    }


def run(chosen: Sequence[str], sizes: Sizes) -> dict[str, object]:
    """Measure the chosen contenders one after the other."""
    found: dict[str, dict[str, object]] = {}
    with servers() as (own, running, home):
        execute(postgres.dsn(running["postgres"].port, postgres.passfile(own.private())), "create database bench")
        dsn = postgres.dsn(running["postgres"].port, postgres.passfile(own.private()), "bench")
        makers = contenders(own, running, home)
        for name in chosen:
            found[name] = measure(makers[name](), dsn, sizes)
            print(f"{name:18} {json.dumps(found[name])}", flush=True)
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {"workload": asdict(sizes), "machine": machine, "contenders": found, "ratios": ratios(found)}


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Rate as a part of pg_recvlogical's, and how many times as fast, cheap and small as Debezium."""
    said: dict[str, dict[str, float]] = {name: {} for name in found}
    for name, each in found.items():
        if limit := found.get("pg_recvlogical"):
            said[name]["rate_of_pg_recvlogical"] = round(each["changes_per_s"] / limit["changes_per_s"], 2)
        if rival := found.get("debezium_kafka"):
            said[name]["speed_of_debezium"] = round(each["changes_per_s"] / rival["changes_per_s"], 2)
            said[name]["debezium_cpu"] = round(rival["cpu_us_per_change"] / max(each["cpu_us_per_change"], 0.1), 2)
            said[name]["debezium_memory"] = round(rival["peak_rss_mb"] / each["peak_rss_mb"], 2)
    return said


def chosen_contenders(named: str) -> list[str]:
    """CONTENDERS: names with commas between them; empty: all."""
    wanted = [name.strip() for name in named.split(",") if name.strip()]
    if strangers := [name for name in wanted if name not in NAMES]:
        raise SystemExit(f"CONTENDERS: {strangers[0]!r} is none of {', '.join(NAMES)}")
    return [name for name in NAMES if name in wanted or not wanted]


def main() -> None:
    """Print a line for each and the ratios; write the results, those of a selection only where OUT says."""
    chosen = chosen_contenders(os.environ.get("CONTENDERS", ""))
    out = os.environ.get("OUT") or (str(RESULTS) if len(chosen) == len(NAMES) else "")
    results = run(chosen, Sizes.from_environment())
    print(json.dumps(results["ratios"], indent=1))
    if out:
        Path(out).parent.mkdir(exist_ok=True)
        Path(out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A whole table into a log, compared: psql's copy, Millrace with both logs, Debezium.

    python -m bench.snapshot        (ROWS, RUNS, CONTENDERS, OUT from the environment)

`psql_copy` is `\\copy … to /dev/null`: the server's work and the least that a client can do, without decoding or
storing. Every other contender ends with every row durable in its log. Millrace is measured from the slot to the last
row, Debezium from its first message to its last: no start-up time counts. CPU is that of the reading process, without
broker and server; `busy_cores` is the CPU use of the whole machine.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cdc.log
from bench import cpu_meter, workload
from bench.capture.other_tools import Debezium
from bench.capture.run import connect as connect_server
from bench.comparison import Comparison, medians
from bench.environment import Database, Workspace, benchmark_postgres, folder, workspace
from bench.workload import TABLE
from cdc.capture.replication.loop import CaptureLoop
from cdc.capture.source import publication
from cdc.capture.source import slot as slots
from cdc.capture.source.connect import connect
from cdc.capture.transactions.spill import SpillFolder
from cdc.clock import SystemClock
from cdc.config.pipeline_file import check
from cdc.config.settings import Settings
from cdc.model import LOG_SCHEMA, Entry
from cdc.ports import LogWriter
from cdc.service.daemon import footprint
from cdc.service.daemon.supervisor import CAPTURE_ENVIRONMENT
from deploy.local.kafka import Kafka
from sinks import registry
from snapshots.backfill.coordinator import Backfills
from snapshots.initial.snapshot import run_initial

VARIANTS = {"millrace_one_worker": {"snapshot_workers": 1}, "millrace_two_workers": {"snapshot_workers": 2},
            "millrace_chunked": {}}  # fmt: skip
"""Other ways into the segment log."""
COMPARISON = Comparison(
    "snapshot",
    ("psql_copy", "millrace_segments", "millrace_kafka", "debezium_kafka"),
    "psql_copy",
    "row",
    tuple(VARIANTS),
)
Figures = dict[str, float]


# -- Millrace, in a process of its own


def contend(name: str, source: Mapping[str, Any], log: Mapping[str, Any]) -> Figures:
    """Read the table once; called in a fresh process, so that memory and CPU are this contender's alone."""
    mode = "incremental" if name == "millrace_chunked" else "initial"
    slot = f"bench_{name}"
    own = {**source, **VARIANTS.get(name, {}), "slot": slot, "publication": slot,
           "tables": [{"name": TABLE, "snapshot": mode}]}  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder()) as state:
        sections = {"state": state, "source": own, "log": dict(log)}
        settings = check(sections, cdc.log.settings_kinds(), registry.settings_kinds(), "the bench")
        with connect(settings.source) as connection:
            publication.ensure(connection, settings.source)
        try:
            with contextlib.closing(cdc.log.open_writer(settings)) as writer:
                return _initial(settings, writer) if mode == "initial" else _chunked(settings, writer)
        finally:
            with connect(settings.source) as connection:
                slots.drop(connection, slot)
                connection.execute(f"drop publication {slot}".encode())


def _measured(work: Callable[[], int]) -> Figures:
    began, cpu, busy = time.monotonic(), time.process_time(), cpu_meter.busy_seconds()
    rows = work()
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    return _figures(rows, seconds, used, cpu_meter.peak_rss_mb(os.getpid()), cpu_meter.busy_seconds() - busy)


def _figures(rows: int, seconds: float, cpu: float, peak: float, busy: float) -> Figures:
    return {
        "rows": rows,
        "rows_per_s": round(rows / seconds),
        "cpu_us_per_row": round(cpu / rows * 1e6, 2),
        "peak_rss_mb": peak,
        "busy_cores": round(busy / seconds, 2),
    }


def _initial(settings: Settings, log: LogWriter) -> Figures:
    with slots.create(settings.source, 60, lambda text: None) as made:

        def read() -> int:
            run_initial(settings, made, log)
            return int(json.loads(log.progress().marks["snapshot"])["rows"])

        return _measured(read)


def _chunked(settings: Settings, log: LogWriter) -> Figures:
    with slots.create(settings.source, 60, lambda text: None) as made:
        identity = slots.SourceIdentity.of_created(made)
        log.append(Entry(LOG_SCHEMA.empty_table(), made.consistent_point, {slots.MARK: identity.mark()}))
    clock, stop = SystemClock(), threading.Event()
    backfills = Backfills(settings, log, clock)
    reader = CaptureLoop(settings.source, log, clock, SpillFolder(settings.state / "scratch"), listener=backfills)
    stream = threading.Thread(target=reader.run, args=(stop,))
    stream.start()

    def read() -> int:
        backfills.start()
        cpu_meter.wait(lambda: backfills.facts()[0]["state"] == "done", "the backfill")
        return int(str(backfills.facts()[0]["rows"]))

    try:
        with contextlib.closing(backfills):
            return _measured(read)
    finally:
        stop.set()
        stream.join()


def apart(name: str, source: Mapping[str, Any], log: Mapping[str, Any]) -> Figures:
    """`contend` in a fresh process as the daemon starts its own; settings hold a password, so they go through stdin."""
    command = [sys.executable, "-m", "bench.snapshot", name]
    given, environment = json.dumps([source, log]), {**os.environ, **CAPTURE_ENVIRONMENT}
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


# -- the other contenders


def psql(dsn: str, rows: int) -> Figures:
    """The minimum: `\\copy` to /dev/null."""
    program = shutil.which("psql") or "psql"
    began, busy, peak, pid = time.monotonic(), cpu_meter.busy_seconds(), 0.0, 0
    child = subprocess.Popen([program, "-X", "-q", dsn, "-c", f"\\copy {TABLE} to /dev/null"])
    while not pid:
        # rusage's peak would include memory that the child shared with this process before exec.
        with contextlib.suppress(OSError):
            peak = max(peak, cpu_meter.peak_rss_mb(child.pid))
        time.sleep(0.01)
        pid, state, usage = os.wait4(child.pid, os.WNOHANG)
    seconds, child.returncode = time.monotonic() - began, os.waitstatus_to_exitcode(state)
    if child.returncode:
        raise RuntimeError("psql failed")
    return _figures(rows, seconds, usage.ru_utime + usage.ru_stime, peak, cpu_meter.busy_seconds() - busy)


def debezium(peer: Debezium, rows: int) -> Figures:
    """The connector's own snapshot into one topic."""
    peer.snapshot()
    try:
        cpu_meter.wait(lambda: peer.messages() > 0, "the connector's first message", 180, 0.01)
        began, cpu, busy, first = time.monotonic(), peer.cpu(), cpu_meter.busy_seconds(), peer.messages()
        cpu_meter.wait(lambda: peer.messages() >= rows, "the connector's snapshot", 1800, 0.01)
        seconds, used = time.monotonic() - began, peer.cpu() - cpu
        return _figures(rows - first, seconds, used, peer.peak_rss_mb(), cpu_meter.busy_seconds() - busy)
    finally:
        peer.finish()


# -- all of them


def run(chosen: Sequence[str], rows: int, runs: int) -> dict[str, object]:
    """Measure every contender several times in turn and take the median of each figure. Debezium runs once."""
    found: dict[str, list[Figures]] = {name: [] for name in chosen}
    with workspace("snapshot", benchmark_postgres(), Kafka(), connect_server()) as space:
        space.up("postgres", *(("kafka",) if any(name.endswith("_kafka") for name in chosen) else ()))
        database = space.database()
        workload.load(database.dsn, rows)
        for turn in range(runs):
            for name in chosen:
                if name == "debezium_kafka" and turn:
                    continue
                before = cpu_meter.load()
                figures = _one(name, turn, space, database, rows)
                found[name].append({**figures, "load": before})
                print(f"{name:20} {_shown(figures)}  load {before}", flush=True)
    settled = {name: medians(many) for name, many in found.items()}
    return {"workload": {"rows": rows, "runs": runs}, "contenders": settled}


def _one(name: str, turn: int, space: Workspace, database: Database, rows: int) -> Figures:
    if name == "psql_copy":
        return psql(database.dsn, rows)
    if not name.endswith("_kafka"):
        return apart(name, database.source, {"kind": "segments"})
    bootstrap = space.up("kafka")["kafka"].address
    if name == "millrace_kafka":
        topic = {"kind": "kafka", "bootstrap": bootstrap, "prefix": f"bench_millrace_{turn}", "partitions": 1}
        return apart(name, database.source, topic)
    worker = space.up("connect")["connect"]
    database.execute("checkpoint")
    return debezium(Debezium(database, bootstrap, worker), rows)


def _shown(figures: Figures) -> str:
    return (
        f"{figures['rows_per_s']:>10,.0f} rows/s {figures['cpu_us_per_row']:>6.2f} µs CPU a row "
        f"{figures['peak_rss_mb']:>7.1f} MB {figures['busy_cores']:.2f} cores busy"
    )


def main() -> None:
    """Print a line for each turn and the ratios; write the results. With an argument, be that contender."""
    if len(sys.argv) > 1:
        footprint.block_import("pandas")
        footprint.collect_rarely()
        print(json.dumps(contend(sys.argv[1], *json.load(sys.stdin))))
        return
    rows, runs = int(os.environ.get("ROWS", "1000000")), int(os.environ.get("RUNS", "3"))
    COMPARISON.run(lambda chosen: run(chosen, rows, runs))


if __name__ == "__main__":
    main()

"""A whole table into the log, beside the quickest way to read it at all.

    python -m bench.snapshot        (ROWS and RUNS from the environment)

`psql` is `\\copy … to /dev/null`: the server's work and the least that a client can do, nothing decoded, nothing kept.
`initial` is the first snapshot under the slot's exported one, with one and with two workers; `chunked` reads the same
table beside the stream. Both end with every row durable in the segment log. CPU is the reading process's own.
"""

import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cdc.log
from bench import meter, workload
from cdc.capture import publication
from cdc.capture import slot as slots
from cdc.capture.connect import connect
from cdc.capture.reader import Reader
from cdc.clock import SystemClock
from cdc.config import Settings
from cdc.log.segments import SegmentSettings
from cdc.model import LOG_SCHEMA, Entry
from cdc.ports import LogWriter
from deploy.local import postgres
from deploy.local.folders import cache_folder
from deploy.local.postgres import Postgres
from deploy.local.servers import Servers
from snapshots.chunked import Backfills
from snapshots.initial import run_initial

RESULTS = Path(__file__).parent / "results" / "snapshot.json"
TABLE = "public.bench_orders"
_POSTGRES = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}
Figures = dict[str, float]


@contextlib.contextmanager
def database() -> Iterator[tuple[str, dict[str, Any]]]:
    """A Postgres of our own, gone afterwards: a connection string, and the source section of a pipeline."""
    base = cache_folder() / "bench"
    base.mkdir(mode=0o711, parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="snapshot-", dir=base))
    home.chmod(0o711)
    own = Servers(home, {"postgres": Postgres(_POSTGRES)}, tied=True)
    try:
        server = own.up(("postgres",))["postgres"]
        dsn = postgres.dsn(server.port, postgres.passfile(own.private()), "postgres")
        secret = postgres.password(own.private()).reveal()
        yield dsn, {"host": server.host, "port": server.port, "user": "postgres", "password": secret}
    finally:
        own.down()
        shutil.rmtree(home, ignore_errors=True)


# -- one contender, in a process of its own


def contend(name: str, source: Mapping[str, Any]) -> Figures:
    """Read the table once; called in a fresh process, so that memory and CPU are this contender's alone."""
    mode, _, workers = name.partition("-")
    table = {"name": TABLE, "snapshot": "initial" if mode == "initial" else "incremental"}
    slot = f"bench_{mode}"
    own = {**source, "slot": slot, "publication": slot, "tables": [table], "snapshot_workers": int(workers or 1)}
    with tempfile.TemporaryDirectory(dir=cache_folder() / "bench") as folder:
        settings = Settings.model_validate({"state": folder, "source": own, "log": SegmentSettings()})
        with connect(settings.source) as connection:
            slots.drop(connection, slot)
            publication.ensure(connection, settings.source)
        with contextlib.closing(cdc.log.open_writer(settings)) as log:
            figures = _initial(settings, log) if mode == "initial" else _chunked(settings, log)
        with connect(settings.source) as connection:
            slots.drop(connection, slot)
        return figures


def _measured(work: Callable[[], int]) -> Figures:
    began, cpu = time.monotonic(), time.process_time()
    rows = work()
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    return {
        "rows": rows,
        "rows_per_s": round(rows / seconds),
        "cpu_us_per_row": round(used / rows * 1e6, 2),
        "peak_rss_mb": meter.peak_rss_mb(os.getpid()),
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
    reader = Reader(settings.source, log, clock, settings.state / "scratch", listener=backfills)
    stream = threading.Thread(target=reader.run, args=(stop,))
    stream.start()

    def read() -> int:
        backfills.start()
        meter.wait(lambda: backfills.facts()[0]["state"] == "done", "the backfill")
        return int(str(backfills.facts()[0]["rows"]))

    try:
        with contextlib.closing(backfills):
            return _measured(read)
    finally:
        stop.set()
        stream.join()


# -- all of them


def psql(dsn: str, rows: int) -> Figures:
    """The floor."""
    program = shutil.which("psql") or "psql"
    with subprocess.Popen([program, "-X", "-q", dsn, "-c", f"\\copy {TABLE} to /dev/null"]) as child:
        began = time.monotonic()
        _, state, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(state)
    if child.returncode:
        raise RuntimeError("psql failed")
    seconds = time.monotonic() - began
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "rows": rows,
        "rows_per_s": round(rows / seconds),
        "cpu_us_per_row": round(cpu / rows * 1e6, 2),
    }


def apart(name: str, source: Mapping[str, Any]) -> Figures:
    """`contend` in a fresh process; the source goes through its standard input, since it holds a password."""
    command = [sys.executable, "-m", "bench.snapshot", name]
    done = subprocess.run(command, input=json.dumps(source), capture_output=True, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def run() -> dict[str, object]:
    """Every contender, several times in turn; the middle value of each figure counts."""
    rows, runs = int(os.environ.get("ROWS", "1000000")), int(os.environ.get("RUNS", "3"))
    found: dict[str, list[Figures]] = {}
    with database() as (dsn, source):
        workload.load(dsn, rows)
        before = meter.load()
        for _ in range(runs):
            found.setdefault("psql", []).append(psql(dsn, rows))
            for name in ("initial-1", "initial-2", "chunked"):
                found.setdefault(name, []).append(apart(name, source))
    return {
        "workload": {"rows": rows, "runs": runs},
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": {"before": before, "after": meter.load()},
        },
        "contenders": {
            name: {figure: statistics.median(each[figure] for each in many) for figure in many[0]}
            for name, many in found.items()
        },
    }


def main() -> None:
    """Print a table and write the results; with an argument, be one contender."""
    if len(sys.argv) > 1:
        print(json.dumps(contend(sys.argv[1], json.load(sys.stdin))))
        return
    results = run()
    contenders: Any = results["contenders"]
    for name, figures in contenders.items():
        shown = f"{figures['rows_per_s']:>10,.0f} rows/s {figures['cpu_us_per_row']:>6.2f} µs CPU a row"
        memory = f"{figures['peak_rss_mb']:>7.1f} MB" if "peak_rss_mb" in figures else ""
        print(f"{name:10} {shown} {memory}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

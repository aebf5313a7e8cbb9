"""The servers, the captured table and the two processes of a pipeline for the measurements of the sinks.

A sink's progress is read from the consumer positions in the log. They are written after the store's answer, so a
measured time is never earlier than the time at which a client of the store can read the row by key.
"""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import cdc.log
from bench import cpu_meter
from bench.environment import Database, benchmark_postgres, workspace
from bench.workload import TABLE
from cdc.ports import LogReader
from cdc.service.daemon import process as part
from cdc.service.state import status
from deploy.local.kafka import Kafka
from deploy.local.opensearch import OpenSearch
from deploy.local.redis import Redis
from deploy.local.server import Running

_POLL_SECONDS = 0.005
STORES = ("delta", "opensearch", "redis")


@dataclass(frozen=True, slots=True)
class SinkEnvironment:
    """The folder, database and servers of the whole measurement."""

    home: Path
    database: Database
    servers: Mapping[str, Running]

    def log(self, kind: str) -> dict[str, Any]:
        """The log section of a pipeline."""
        if kind == "segments":
            return {"kind": "segments"}
        return {"kind": "kafka", "bootstrap": self.servers["kafka"].address, "prefix": "bench", "partitions": 1}

    def sink(self, kind: str, name: str) -> dict[str, Any]:
        """The section of a sink; sinks with different names store their rows separately."""
        own: dict[str, dict[str, Any]] = {
            "delta": {"path": str(self.home / "lake" / name)},
            "opensearch": {"url": self.servers["opensearch"].address, "prefix": f"{name}-", "replicas": 0},
            "redis": {"url": self.servers["redis"].address, "prefix": f"{name}:"},
        }
        return {"kind": kind, "name": name, **own[kind]}

    def store_cpu(self) -> float:
        """CPU seconds of the stores that are servers."""
        return sum(cpu_meter.cpu_seconds(self.servers[name].pid) for name in ("opensearch", "redis"))


@contextlib.contextmanager
def sink_environment(kafka: bool) -> Iterator[SinkEnvironment]:
    """Start the servers; stop and remove them at the end."""
    with workspace("sinks", benchmark_postgres(), Redis(), OpenSearch(), Kafka()) as place:
        running = place.up("postgres", "redis", "opensearch", *(("kafka",) if kafka else ()))
        yield SinkEnvironment(place.home, place.database(), running)


@dataclass(slots=True)
class Process:
    """A process of the daemon, as the supervisor would run it."""

    name: str
    config: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its output goes to a file beside its configuration."""
        with self.config.with_suffix(f".{self.name}.log").open("ab") as output:
            command = [sys.executable, "-m", f"cdc.service.{self.name}.process", "--config", str(self.config)]
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def end(self) -> float:
        """Ask it to stop; returns how many seconds that took."""
        begun = time.monotonic()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(90)
        return time.monotonic() - begun

    def alive(self) -> bool:
        """True; raises if it ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}; see {self.config.parent}")
        return True

    def cpu(self) -> float:
        """CPU seconds of the process and all its descendants, also of those that have ended."""
        return 0.0 if self.process is None else cpu_meter.tree_cpu(self.process.pid)


@dataclass(slots=True)
class Pipeline:
    """One state folder: a capture process, and at any time at most one apply process on some of the sinks."""

    environment: SinkEnvironment
    kind: str
    folder: Path
    sinks: Sequence[dict[str, Any]] = ()
    spark: Mapping[str, Any] = field(default_factory=lambda: {"memory": "2g"})
    tables: Sequence[str] = (TABLE,)
    _processes: dict[str, Process] = field(default_factory=dict)

    def start(self, name: str) -> Process:
        """Start `capture` or `apply` with the present sinks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        process = Process(name, self.folder / f"{name}.yaml")
        process.config.write_text(yaml.safe_dump(self._sections()))
        process.start()
        self._processes[name] = process
        return process

    def log(self) -> LogReader:
        """A reader of its log."""
        return cdc.log.open_reader(part.settings_from(self.folder / "capture.yaml"))

    def captured(self) -> int:
        """Wait until the log has everything that is committed now; returns the LSN up to which the log is complete."""
        target = self.environment.database.wal_end()
        cpu_meter.wait(lambda: int(str(self._status("capture").get("watermark", 0))) >= target, "capture", 900, 0.1)
        return int(self.log().head()[1])

    def end(self) -> None:
        """Stop both processes."""
        for name in ("apply", "capture"):
            if name in self._processes:
                self._processes[name].end()

    def _status(self, name: str) -> dict[str, object]:
        facts, process = status.read(self.folder / "state", name), self._processes[name].process
        if process is not None and process.poll() not in (None, 0):
            raise RuntimeError(f"{name} ended with {process.returncode}; see {self.folder}")
        return facts if process is not None and facts.get("pid") == process.pid else {}

    def _sections(self) -> dict[str, Any]:
        slot = f"bench_{self.kind}"
        source = {**self.environment.database.source, "slot": slot, "publication": slot,
                  "heartbeat_seconds": 1.0, "tables": list(self.tables)}  # fmt: skip
        return {
            "state": str(self.folder / "state"),
            "source": source,
            "log": self.environment.log(self.kind),
            "sinks": list(self.sinks),
            "spark": dict(self.spark),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """A sink's position and when it was first seen, by both clocks."""

    monotonic: float
    wall: float
    reached: int


class Positions:
    """Records every change of the sinks' positions while it is open."""

    def __init__(self, log: LogReader, names: Sequence[str]) -> None:
        self.steps: dict[str, list[Step]] = {name: [] for name in names}
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Positions":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def reached(self) -> int:
        """The position of the slowest sink."""
        return min((steps[-1].reached if steps else 0) for steps in self.steps.values())

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            found = {item.name: int(item.reached) for item in self._log.consumers()}
            for name, steps in self.steps.items():
                reached = found.get(name, 0)
                if reached and (not steps or reached > steps[-1].reached):
                    steps.append(Step(time.monotonic(), time.time(), reached))

"""A soak test: a busy shop while every process is killed at random: python -m bench.soak.run --minutes 30.

At the end it compares every row of every store with the source and writes the faults, the recovery times and the growth
to bench/results/soak.json, or with `--cluster` to soak_cluster.json. Exit code 0 only if nothing differs, no process is
left over and nothing grows. The same seed injects the same faults in the same order, but not at exactly the same times.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import yaml

from bench.comparison import RESULTS, machine, write
from bench.cpu_meter import load, tree, wait
from bench.soak import watch
from bench.soak.placement import CLUSTER, LOCAL, Placement
from bench.soak.result import Fault, growths, summary
from bench.soak.shop import Crowd
from cdc.config.settings import Settings
from cdc.errors import LogLost
from cdc.model import parse_lsn
from cdc.service.daemon.process import settings_from
from cdc.service.inspect.verification import differences
from cdc.service.observe.positions import Positions
from cdc.service.state import status
from deploy.demo import pipeline
from deploy.local.servers import Servers

_PATIENCE = 300.0
"""Seconds after which a pipeline that does not catch up counts as stuck. OpenSearch alone may need 60, and all of it
ten times as long on a machine that is busy with something else."""


@dataclass(slots=True)
class Soak:
    """One run over servers that are up. Call from the main thread: servers die with the thread that starts them."""

    servers: Servers
    minutes: float
    seed: int = 1
    placement: Placement = LOCAL
    kinds: Sequence[str] = ()
    """Faults to inject; none: all that the placement has."""
    patience: float = _PATIENCE
    pause: float = 0.03
    """Seconds between two actions of a customer."""
    say: Callable[[str], None] = print
    faults: list[Fault] = field(default_factory=list)
    samples: list[watch.Sample] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    mark: str = field(default_factory=lambda: f"{os.getpid()}-{time.monotonic_ns()}")
    _daemon: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.kinds = self.kinds or self.placement.kinds

    # -- the pipeline

    def settings(self) -> Settings:
        """The demo's shop and pipeline, in this placement."""
        config = pipeline.provision(self.servers, self.servers.status()["opensearch"].port)
        facts = yaml.safe_load(config.read_text(encoding="utf-8"))
        self.placement.sections(self.servers, facts)
        facts["source"]["heartbeat_seconds"] = 5
        config.write_text(yaml.safe_dump(facts, sort_keys=False), encoding="utf-8")
        return settings_from(config)

    def start(self) -> None:
        """Start the daemon."""
        config = pipeline.config_path(self.servers.home)
        log = (self.servers.home / "logs" / "millrace.log").open("ab")
        command = [sys.executable, "-m", "cdc.cli.main", "run", "--config", str(config)]
        environment = {**os.environ, watch.MARK: self.mark}
        with log:
            self._daemon = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._daemon is not None
        self._daemon.terminate()
        return self._daemon.wait(90)

    def pid(self, settings: Settings, part: str) -> int:
        """The pid of a running process; 0 if its status has none."""
        if part == "daemon":
            return self._daemon.pid if self._daemon and self._daemon.poll() is None else 0
        found = status.read(settings.state, part).get("pid")
        pid = found if isinstance(found, int) else 0
        return pid if pid in watch.marked(self.mark) else 0

    def abandon(self) -> None:
        """Kill a daemon that still runs: its servers are about to end."""
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.kill()
            self._daemon.wait(30)

    def clean_up(self) -> None:
        """For servers that keep running: drop the shop, its slot, the pipeline's state and the lake."""
        settings = settings_from(pipeline.config_path(self.servers.home))
        with pipeline.connect(self.servers, "postgres") as admin:
            admin.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s",
                (settings.source.slot,),
            )
            admin.execute("drop database if exists shop with (force)")
        for path in (settings.state, self.servers.home / "lake"):
            shutil.rmtree(path, ignore_errors=True)

    # -- faults

    def inject(self, settings: Settings, kind: str) -> Fault:
        """Inject a fault; returns once everything that does not restart by itself was started again."""
        fault = Fault(kind, round(time.monotonic() - self.began, 1))
        verb, _, what = kind.partition(" ")
        if what in ("capture", "apply"):
            self._signal(self.pid(settings, what), verb)
        elif what == "spark":
            java = [pid for pid in tree(self.pid(settings, "apply")) if _program(pid) == "java"]
            self._signal(java[0] if java else 0, verb)
        elif what == "daemon":
            fault.exit_code = self._restart(verb)
        else:
            self._disturb(what, verb)
        return fault

    def _signal(self, pid: int, verb: str) -> None:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if verb == "pause" else signal.SIGKILL)
                if verb == "pause":
                    time.sleep(6)
                    os.kill(pid, signal.SIGCONT)

    def _restart(self, verb: str) -> int:
        assert self._daemon is not None
        if verb == "stop":
            code = self.stop()
        else:
            self._daemon.kill()
            code = self._daemon.wait(30)
        self.start()
        return code

    def _disturb(self, server: str, verb: str) -> None:
        if verb == "pause":
            self._signal(self.servers.status()[server].pid, verb)
            return
        self.servers.down([server], {"kill": signal.SIGKILL, "crash": signal.SIGQUIT}.get(verb))
        self.servers.up([server])

    # -- observing

    def settle(self, positions: Positions) -> float:
        """Wait until every sink has everything that is committed now; returns the seconds. Raises TimeoutError."""
        begun = time.monotonic()
        with self._owner() as owner:
            row = owner.execute("select pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        wanted = parse_lsn(str(row[0]))

        def reached() -> bool:
            if self._daemon is not None and self._daemon.poll() is not None:
                raise RuntimeError(f"the daemon ended with {self._daemon.returncode}")
            with suppress(LogLost):  # brokers were killed: they are back, or will be
                return not positions.behind(wanted)
            return False

        wait(reached, f"every store at {row[0]}", self.patience, every=0.1)
        return round(time.monotonic() - begun, 1)

    def look(self, settings: Settings) -> None:
        """Take one sample."""
        pids = {name: pid for name in ("daemon", "capture", "apply") if (pid := self.pid(settings, name))}
        if len(pids) < 3 or not set(pids.values()) <= set(tree(pids["daemon"])):
            return  # processes of a killed daemon may not have ended yet
        with self._owner() as owner:
            held = watch.retained_bytes(owner, settings.source.slot)
        self.samples.append(watch.sample(time.monotonic() - self.began, pids, settings.state, held))

    def _owner(self) -> psycopg.Connection:
        return pipeline.connect(self.servers)

    # -- the run

    def run(self) -> dict[str, Any]:
        """Inject faults until the time is over, then compare; returns the result."""
        settings = self.settings()
        positions = Positions(settings)
        chance = random.Random(self.seed)
        self.start()
        trouble = ""
        crowd = Crowd(self._owner, pause=self.pause, seed=self.seed)
        try:
            self.say(f"the pipeline caught up in {self.settle(positions)} s")
            self.began = time.monotonic()
            with crowd.at_work():
                self._faults(settings, positions, chance)
            self.settle(positions)
        except (TimeoutError, RuntimeError) as error:
            trouble = str(error)
            self.say(f"stuck: {trouble}")
        seconds = time.monotonic() - self.began
        return self._judged(settings, crowd.committed, seconds, trouble)

    def _faults(self, settings: Settings, positions: Positions, chance: random.Random) -> None:
        order = _Order(chance, self.kinds)
        while time.monotonic() - self.began < self.minutes * 60 or not self._had_all():
            time.sleep(chance.uniform(0.5, 8))
            self.look(settings)
            kinds = [next(order) for _ in range(chance.choice((1, 1, 1, 2)))]
            done = [self.inject(settings, kind) for kind in kinds]
            self.faults += done
            if chance.random() < 0.15:
                continue  # inject the next fault during the recovery from this one
            took = self.settle(positions)
            for fault in done:
                fault.recovery_seconds = took
            self.say(f"{done[0].at:7.1f} s  {', '.join(kinds)}: recovered in {took} s")
            self.look(settings)

    def _had_all(self) -> bool:
        """Whether every kind of fault was injected: on a slow machine a short run would miss some."""
        return set(self.kinds) <= {fault.kind for fault in self.faults}

    def _judged(self, settings: Settings, committed: int, seconds: float, trouble: str) -> dict[str, Any]:
        found = [] if trouble else [one.facts() for one in differences(settings, (), (), 120)]
        wrong = [facts for facts in found if not facts["equal"]]
        code = self.stop() if self._daemon is not None and self._daemon.poll() is None else None
        with suppress(TimeoutError):
            wait(lambda: not watch.marked(self.mark), "all processes to be gone", 20)
        left = [_command(pid) for pid in watch.marked(self.mark)]
        grown = watch.growth(self.samples)
        failures = [
            *([trouble] if trouble else []),
            *(f"{facts['table']} in {facts['sink']} differs" for facts in wrong),
            *([f"{len(left)} process(es) left behind: {'; '.join(left)}"] if left else []),
            *([f"the daemon ended with {code}"] if code not in (0, None) else []),
            *(f"{fault.kind} ended with {fault.exit_code}" for fault in self.faults if fault.wrong),
            *growths(grown),
        ]
        return {
            "minutes": round(seconds / 60, 1),
            "seed": self.seed,
            "transactions": committed,
            "tables_compared": len(found),
            "rows_compared": sum(int(str(facts["rows"])) for facts in found),
            "differences": wrong,
            "faults": summary(self.faults),
            "injected": [asdict(fault) for fault in self.faults],
            "growth": grown,
            "processes_left": len(left),
            "failures": failures,
        }


class _Order:
    """Faults in random order, each kind once before any is repeated, so that a short run includes all of them."""

    def __init__(self, chance: random.Random, kinds: Sequence[str]) -> None:
        self._chance = chance
        self._kinds = kinds
        self._left: list[str] = []

    def __next__(self) -> str:
        if not self._left:
            self._left = list(self._kinds)
            self._chance.shuffle(self._left)
        return self._left.pop()


def _program(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return f"{pid} {' '.join(words)[:80].strip()}"
    return f"{pid} (gone by now)"


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    parser.add_argument("--patience", type=float, default=_PATIENCE, help="seconds to recover in, at most")
    parser.add_argument("--cluster", action="store_true", help="on a Spark cluster, with Kafka and S3")
    parser.add_argument("--out", type=Path, help="default: in bench/results")
    parser.add_argument("--home", type=Path, help="folder for servers and state; default: a new one")
    given = parser.parse_args()
    home = given.home or Path(tempfile.mkdtemp(prefix="millrace-soak-", dir="/var/tmp"))
    home.chmod(0o711)
    print(f"soaking for {given.minutes:g} minutes with seed {given.seed} in {home}", flush=True)
    placement = CLUSTER if given.cluster else LOCAL
    servers = placement.servers(home)
    begun = load()
    try:
        servers.up(placement.server_names)
        say = partial(print, flush=True)
        soak = Soak(servers, given.minutes, given.seed, placement, patience=given.patience, say=say)
        try:
            result = soak.run()
        finally:
            soak.abandon()
    finally:
        servers.down()
    write(
        given.out or RESULTS / placement.results,
        {**result, "machine": {**machine(), "load_before": begun, "load_after": load()}},
    )
    print("\n".join(result["failures"]) or f"all equal: {result['rows_compared']:,} rows compared")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

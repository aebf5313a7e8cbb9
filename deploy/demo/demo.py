"""Runs the demo: servers, pipeline, workload, comparison."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psycopg
from rich.console import Console

from cdc.artifacts.jars import spark_jars
from cdc.config.settings import Settings
from cdc.errors import MillraceError
from cdc.service.daemon.process import settings_from
from cdc.service.inspect.verification import differences
from cdc.service.observe.health import nested, reasons
from cdc.service.observe.page_model import count
from cdc.service.observe.positions import Positions
from cdc.service.state import status
from deploy.demo import daemon, pipeline, proof, shop
from deploy.demo.screen import Screen, SinkView, View, print_facts
from deploy.local.servers import Servers
from snapshots.verify.comparison import Differences

_PATIENCE = 180.0


@dataclass(slots=True)
class Demo:
    """One run. `marks` has the second at which each event was first seen."""

    home: Path
    console: Console
    seconds: float = 20.0
    rate: float = 60.0
    started: float = field(default_factory=time.monotonic)
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    committed: int = 0
    trouble: str = ""
    marks: dict[str, float] = field(default_factory=dict)

    def mark(self, what: str) -> None:
        """Record when an event happened first."""
        self.marks.setdefault(what, time.monotonic() - self.started)

    @property
    def output(self) -> Path:
        """The output of `millrace run`."""
        return self.home / "logs" / "millrace.log"

    def say(self, line: str) -> None:
        """Print one line of progress."""
        self.console.print(f"{time.monotonic() - self.started:5.1f} s  {line}", markup=False)

    @contextmanager
    def servers(self, keep: bool) -> Iterator[Servers]:
        """Start Postgres and Redis; stop all servers at the end unless `keep`."""
        servers = Servers(self.home, report=self.say)
        try:
            servers.up(("postgres", "redis"))
            self.mark("Postgres and Redis are up")
            yield servers
        finally:
            if not keep:
                servers.down()

    def watch(
        self,
        settings: Settings,
        positions: Positions,
        process: subprocess.Popen[bytes],
        screen: Screen,
        over: Callable[[], bool],
    ) -> None:
        """Show the pipeline until `over` is true; raises if the daemon ends or it takes too long."""
        deadline = time.monotonic() + self.seconds + _PATIENCE
        while not over():
            screen.show(self.view(settings, positions))
            daemon.require_running(process, settings, self.output)
            if time.monotonic() > deadline:
                raise MillraceError("The sinks did not catch up in time.", "See: millrace status")
            time.sleep(0.1)
        screen.show(self.view(settings, positions))

    def view(self, settings: Settings, positions: Positions) -> View:
        """The state of the pipeline now."""
        capture, apply = self._status(settings, "capture"), self._status(settings, "apply")
        head, reached = positions.head(), positions.reached()
        sinks = []
        for name, lsn in reached.items():
            facts = nested(apply, "sinks", name)
            if lsn and facts:
                self.mark(f"first rows in {name}")
            sinks.append(
                SinkView(
                    name,
                    str(facts.get("state", "starting")),
                    sum(map(count, nested(facts, "changes").values())),
                    max(0, head - lsn) if lsn else None,
                )
            )
        captured = count(capture.get("changes_total")) + count(nested(capture, "snapshot").get("rows"))
        return View(
            time.monotonic() - self.started,
            self.committed,
            captured,
            str(capture.get("state", "starting")),
            tuple(sinks),
        )

    def _status(self, settings: Settings, part: str) -> Mapping[str, object]:
        """The status of a process in this run; empty if it is from an earlier run."""
        facts = status.read(settings.state, part)
        return {} if status.age(facts, self.began) > 0 else facts

    def is_ready(self, settings: Settings, positions: Positions) -> bool:
        """Whether every process of this run is healthy and every sink has rows."""
        statuses = [self._status(settings, part) for part in ("capture", "apply")]
        if not all(statuses):
            return False
        return all(positions.reached().values()) and not reasons(statuses[0], statuses[1], (), datetime.now(UTC))


def run(home: Path, console: Console, keep: bool = False, seconds: float = 20.0) -> bool:
    """Run the whole demo; returns whether every sink equals the source."""
    demo = Demo(home, console, seconds)
    with demo.servers(keep) as servers:
        port = pipeline.opensearch_port(servers)
        config = pipeline.provision(servers, port)
        settings = settings_from(config)
        search = threading.Thread(target=servers.up, args=(("opensearch",), {"opensearch": port}))
        search.start()
        spark_jars(demo.say)
        with daemon.running(config, demo.output) as process:
            equal = _prove(demo, settings, servers, process)
            search.join()
            if keep:
                _stay(demo, settings, process)
    return equal


def _prove(demo: Demo, settings: Settings, servers: Servers, process: subprocess.Popen[bytes]) -> bool:
    positions = Positions(settings)
    with Screen(demo.console) as screen:
        demo.watch(settings, positions, process, screen, lambda: demo.is_ready(settings, positions))
        demo.mark("first rows in every sink")
        done = threading.Event()
        customers = threading.Thread(target=_shop, args=(demo, servers, done), daemon=True)
        customers.start()
        demo.watch(settings, positions, process, screen, done.is_set)
        customers.join()
        if demo.trouble:
            raise MillraceError(demo.trouble, "Run the demo again: it continues where it stopped.")
        wanted = pipeline.source_lsn(settings)
        demo.watch(settings, positions, process, screen, lambda: not positions.behind(wanted))
        demo.mark("every sink has all changes")
    demo.say("comparing every row of every sink")
    found = list(differences(settings, (), (), _PATIENCE))
    _summary(demo, settings, servers, found)
    return all(one.equal for one in found)


def _shop(demo: Demo, servers: Servers, done: threading.Event) -> None:
    def tell(committed: int) -> None:
        demo.committed = committed

    try:
        with pipeline.connect(servers) as connection:
            shop.run_customers(connection, demo.seconds, demo.rate, tell)
    except (psycopg.Error, KeyError):
        demo.trouble = "The connection to the shop's database was lost."
    finally:
        done.set()


def _summary(demo: Demo, settings: Settings, servers: Servers, found: Sequence[Differences]) -> None:
    with pipeline.connect(servers) as owner:
        print_facts(demo.console, "One order, read from each store", proof.one_order(settings, owner))
    facts = {}
    for sink in settings.sinks:
        mine = [one for one in found if one.sink == sink.name]
        wrong = sum(one.missing + one.extra + one.different for one in mine)
        rows = sum(one.rows for one in mine)
        facts[sink.name] = f"{rows:,} rows compared, " + ("all equal" if not wrong else f"{wrong:,} DIFFER")
    print_facts(demo.console, "Every row of every table", facts)
    print_facts(demo.console, "Where the time went", {what: f"{at:6.1f} s" for what, at in demo.marks.items()})
    config = pipeline.config_path(demo.home)
    look = {
        "again": "make demo (continues with the same data)",
        "keep running": "millrace demo --keep, then open the page that it prints",
        "pipeline": f"{config}",
        "logs": f"{demo.home / 'logs'}",
    }
    print_facts(demo.console, "Where to look further", look)


def _stay(demo: Demo, settings: Settings, process: subprocess.Popen[bytes]) -> None:
    config = pipeline.config_path(demo.home)
    demo.console.print(f"\nStill running; the page: http://127.0.0.1:{settings.http.port}/", markup=False)
    demo.console.print(f"Its status: millrace status --config {config}", markup=False, soft_wrap=True)
    demo.console.print("Ctrl-C stops the pipeline; the servers run until: millrace local down", soft_wrap=True)
    with contextlib.suppress(KeyboardInterrupt):
        process.wait()

"""The demo, start to end: servers, pipeline, customers, proof."""

import contextlib
import subprocess
import sys
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
from cdc.model import Lsn, parse_lsn
from cdc.service.daemon.process import settings_from
from cdc.service.inspect.verification import differences
from cdc.service.observe.health import nested, reasons
from cdc.service.observe.page_model import count
from cdc.service.observe.positions import Positions
from cdc.service.state import status
from deploy.demo import pipeline, proof, shop
from deploy.demo.screen import Screen, SinkView, View, print_facts
from deploy.local.servers import Servers
from snapshots.verify.comparison import Differences

_PATIENCE = 180.0


@dataclass(slots=True)
class Demo:
    """One run. `marks` are the seconds at which things were first seen."""

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
        """Note when something happened first."""
        self.marks.setdefault(what, time.monotonic() - self.started)

    def say(self, line: str) -> None:
        """One line of narration."""
        self.console.print(f"{time.monotonic() - self.started:5.1f} s  {line}", markup=False)

    @contextmanager
    def servers(self, keep: bool) -> Iterator[Servers]:
        """Postgres and Redis up, OpenSearch on its way; all down at the end unless kept."""
        servers = Servers(self.home, narrate=self.say)
        try:
            servers.up(("postgres", "redis"))
            self.mark("Postgres and Redis are up")
            yield servers
        finally:
            if not keep:
                servers.down()

    @contextmanager
    def daemon(self, config: Path) -> Iterator[subprocess.Popen[bytes]]:
        """`millrace run` on that file; stopped tidily at the end."""
        log = (self.home / "logs" / "millrace.log").open("ab")
        command = [sys.executable, "-m", "cdc.cli.main", "run", "--config", str(config)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            log.close()

    def watch(
        self,
        settings: Settings,
        positions: Positions,
        process: subprocess.Popen[bytes],
        screen: Screen,
        over: Callable[[], bool],
    ) -> None:
        """Show the pipeline until something is so; raises if the daemon ends or it takes too long."""
        deadline = time.monotonic() + self.seconds + _PATIENCE
        while not over():
            screen.show(self.view(settings, positions))
            if process.poll() is not None:
                raise MillraceError(self._why(settings), f"See {self.home / 'logs' / 'millrace.log'}")
            if time.monotonic() > deadline:
                raise MillraceError("The stores did not catch up in time.", "See: millrace status")
            time.sleep(0.1)
        screen.show(self.view(settings, positions))

    def view(self, settings: Settings, positions: Positions) -> View:
        """What the parts say now."""
        capture, apply = self._said(settings, "capture"), self._said(settings, "apply")
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

    def _said(self, settings: Settings, part: str) -> Mapping[str, object]:
        """What a part says in this run; an earlier run's last words are none."""
        facts = status.read(settings.state, part)
        return {} if status.age(facts, self.began) > 0 else facts

    def is_ready(self, settings: Settings, positions: Positions) -> bool:
        """Whether every part of this run works and every store has rows."""
        said = [self._said(settings, part) for part in ("capture", "apply")]
        if not all(said):
            return False
        return all(positions.reached().values()) and not reasons(said[0], said[1], (), datetime.now(UTC))

    def source_lsn(self, settings: Settings) -> Lsn:
        with _reader(settings) as connection:
            row = connection.execute("select pg_current_wal_lsn()").fetchone()
        assert row is not None
        return parse_lsn(str(row[0]))

    def _why(self, settings: Settings) -> str:
        for part in ("capture", "apply"):
            message = nested(status.read(settings.state, part), "error").get("message")
            if message:
                return f"{part}: {message}"
        return "millrace ended before the demo was over."


def _reader(settings: Settings) -> psycopg.Connection:
    source = settings.source
    return psycopg.connect(
        host=source.host,
        port=source.port,
        dbname=source.database,
        user=source.user,
        password=source.password.reveal(),
        autocommit=True,
    )


def run(home: Path, console: Console, keep: bool = False, seconds: float = 20.0) -> bool:
    """The whole demo; returns whether every store equals the source."""
    demo = Demo(home, console, seconds)
    with demo.servers(keep) as servers:
        port = pipeline.opensearch_port(servers)
        config = pipeline.provision(servers, port)
        settings = settings_from(config)
        search = threading.Thread(target=servers.up, args=(("opensearch",), {"opensearch": port}))
        search.start()
        spark_jars(demo.say)
        with demo.daemon(config) as process:
            equal = _prove(demo, settings, servers, process)
            search.join()
            if keep:
                _stay(demo, settings, process)
    return equal


def _prove(demo: Demo, settings: Settings, servers: Servers, process: subprocess.Popen[bytes]) -> bool:
    positions = Positions(settings)
    with Screen(demo.console) as screen:
        demo.watch(settings, positions, process, screen, lambda: demo.is_ready(settings, positions))
        demo.mark("first rows in every store")
        done = threading.Event()
        customers = threading.Thread(target=_shop, args=(demo, servers, done), daemon=True)
        customers.start()
        demo.watch(settings, positions, process, screen, done.is_set)
        customers.join()
        if demo.trouble:
            raise MillraceError(demo.trouble, "Run the demo again: it goes on where it was left.")
        wanted = demo.source_lsn(settings)
        demo.watch(settings, positions, process, screen, lambda: not positions.behind(wanted))
        demo.mark("every store holds everything")
    demo.say("comparing every row of every store")
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
        demo.trouble = "The shop's database went away."
    finally:
        done.set()


def _summary(demo: Demo, settings: Settings, servers: Servers, found: Sequence[Differences]) -> None:
    with pipeline.connect(servers) as owner:
        print_facts(demo.console, "One order, as each store tells it", proof.one_order(settings, owner))
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
        "again": "make demo (finds everything where it was left)",
        "stay": "millrace demo --keep, then the page on the address it prints",
        "pipeline": f"{config}",
        "logs": f"{demo.home / 'logs'}",
    }
    print_facts(demo.console, "Where to look further", look)


def _stay(demo: Demo, settings: Settings, process: subprocess.Popen[bytes]) -> None:
    config = pipeline.config_path(demo.home)
    demo.console.print(f"\nStill running; the page: http://127.0.0.1:{settings.http.port}/", markup=False)
    demo.console.print(f"Ask it: millrace status --config {config}", markup=False, soft_wrap=True)
    demo.console.print("Ctrl-C stops the pipeline; the servers stay until: millrace local down", soft_wrap=True)
    with contextlib.suppress(KeyboardInterrupt):
        process.wait()

"""Starts, finds and stops real servers on this machine.

Home folder: `<home>/<server>/` is a server's data, `<home>/private/` has the passwords, `<home>/logs/` the servers'
output, `<home>/records/` their pids. A record is written right after the fork, before the server is ready, so the next
`up` or `down` finds everything that a killed `up` has started.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from cdc.artifacts import folders
from cdc.artifacts.account import Account, account
from cdc.artifacts.downloads import locked
from cdc.artifacts.progress import Report, silent
from cdc.errors import ConfigError, EnvironmentFault
from deploy.local import ports
from deploy.local.cluster.s3 import S3
from deploy.local.cluster.spark import SparkMaster
from deploy.local.connect import Connect
from deploy.local.kafka import Kafka
from deploy.local.opensearch import OpenSearch
from deploy.local.postgres import Postgres
from deploy.local.process import Identity, end, inside, spawn
from deploy.local.records import Records
from deploy.local.redis import Redis
from deploy.local.server import Launch, Running, Server, Site

S = TypeVar("S")
T = TypeVar("T")
STANDARD = ("postgres", "redis", "opensearch")


def known_servers(*more: Server) -> dict[str, Server]:
    """Every kind of server by name, and more of a kind that can have several: Spark workers, Kafka brokers."""
    one_each: tuple[Server, ...] = (Postgres(), Redis(), OpenSearch(), Kafka(), Connect(), S3(), SparkMaster())
    return {server.name: server for server in (*one_each, *more)}


class Servers:
    """The servers of one home folder.

    `tied` servers die with the calling thread (for tests); others run in the background until `down`. Two processes may
    call at the same time: a lock lets one wait for the other.
    """

    def __init__(
        self, home: Path, servers: Mapping[str, Server] | None = None, *, tied: bool = False, report: Report = silent
    ) -> None:
        self.home = home.absolute()
        self._servers = dict(servers or known_servers())
        self._tied = tied
        self._report = report
        self._records = Records(self.home / "records")
        self._stop_waiting = threading.Event()

    def up(self, names: Sequence[str] = STANDARD, requested: Mapping[str, int] | None = None) -> dict[str, Running]:
        """Start the servers that do not run yet, in parallel; returns when they and the servers they need are ready.

        `requested` gives fixed ports. If one server fails, those that this call has started are stopped again.
        """
        wanted = self._with_dependencies(names)
        folders.make(self.home, 0o711)
        for part in ("private", "logs", "records"):
            folders.make(self.home / part, 0o700)
        with locked(self.home / "lock"):
            found = self._records.running()
            _require_same_ports(found, requested or {})
            missing = [name for name in wanted if name not in found]
            self._in_parallel(lambda name: self._servers[name].install(self._report), missing)
            started: list[Running] = []
            try:
                self._in_parallel(self._await, [self._site_of(found[name]) for name in wanted if name in found])
                self._start_in_order(missing, requested or {}, started)
            except BaseException:
                for running in started:
                    self._end(running)
                raise
            return {name: running for name, running in self._records.running().items() if name in wanted}

    def status(self) -> dict[str, Running]:
        """The servers that run now."""
        return self._records.running()

    def down(self, names: Sequence[str] | None = None, how: signal.Signals | None = None) -> list[str]:
        """Stop servers (none named: all), dependent ones first; returns the names of the stopped servers.

        `how` replaces the signal for a clean end, for instance SIGKILL to simulate a crash. Data is always kept.
        """
        if not self.home.is_dir():
            return []
        with locked(self.home / "lock"):
            running = self._records.running()
            # another process may have started more, such as further Spark workers: they depend on those known here
            order = [*(name for name in self._records.names() if name not in self._servers), *reversed(self._servers)]
            stopping = [name for name in order if name in running and name in (names or running)]
            for name in stopping:
                self._end(running[name], how)
            for name in names or order:
                self._end_strays(name)
            return stopping

    def private(self) -> Path:
        """The folder with passwords."""
        return self.home / "private"

    # -- starting

    def _with_dependencies(self, names: Sequence[str]) -> list[str]:
        wanted: list[str] = []
        for name in names:
            if name not in self._servers:
                raise ConfigError(f"There is no local server `{name}`.", f"Choose from {', '.join(self._servers)}.")
            wanted += [
                need for need in (*self._with_dependencies(self._servers[name].after), name) if need not in wanted
            ]
        return wanted

    def _start_in_order(self, missing: Sequence[str], requested: Mapping[str, int], started: list[Running]) -> None:
        """Start in rounds: each starts all servers whose dependencies run."""
        while missing:
            round_names = [name for name in missing if not set(self._servers[name].after) & set(missing)]
            self._start(round_names, requested, started)
            missing = [name for name in missing if name not in round_names]

    def _start(
        self, names: Sequence[str], requested: Mapping[str, int], started: list[Running], *, again: bool = False
    ) -> None:
        sites = self._sites(names, requested)
        launches = self._in_parallel(lambda site: self._servers[site.name].prepare(site), sites)
        for site, launch in zip(sites, launches, strict=True):
            started.append(self._spawn(site, launch))
        try:
            self._in_parallel(self._await, sites)
        except EnvironmentFault:
            without_port = [site.name for site in sites if self._lost_its_port(site) and site.name not in requested]
            if again or not without_port:
                raise
            self._start(without_port, requested, started, again=True)
            self._in_parallel(self._await, [site for site in sites if site.name not in without_port])

    def _lost_its_port(self, site: Site) -> bool:
        """Whether the server ended because another program took its port between the choice and the start."""
        return site.name not in self._records.running() and not all(ports.free(port) for port in site.ports)

    def _sites(self, names: Sequence[str], requested: Mapping[str, int]) -> list[Site]:
        taken: set[int] = set(requested.values())
        ports_of = self._records.ports()
        for name in names:
            ports_of[name] = self._ports(name, requested.get(name), taken)
            taken.update(ports_of[name])
        return [self._site(name, folders.data_folder(self.home, name, self._user(name)), ports_of) for name in names]

    def _site(self, name: str, data: Path, ports_of: Mapping[str, tuple[int, ...]]) -> Site:
        running = self._records.running()
        peers = {need: running[need] for need in self._servers[name].after if need in running}
        log = self.home / "logs" / f"{name}.log"
        return Site(name, data, self.private(), log, ports_of[name], peers, ports_of)

    def _site_of(self, running: Running) -> Site:
        return self._site(running.name, running.data, {**self._records.ports(), running.name: running.ports})

    def _user(self, name: str) -> Account | None:
        return None if self._servers[name].own_user else account()

    def _ports(self, name: str, requested: int | None, taken: set[int]) -> tuple[int, ...]:
        """The requested port, else the last ones, so that settings that name them stay valid, else free ones."""
        if requested is not None and not ports.free(requested):
            raise EnvironmentFault(
                f"Port {requested}, requested for {name}, is in use.", "Stop what listens there or choose another port."
            )
        last = self._records.last(name)
        kept = [port for port in (last.ports if last else ()) if port not in taken and ports.free(port)]
        chosen: list[int] = [] if requested is None else [requested]
        while len(chosen) < self._servers[name].port_count:
            chosen.append(kept[len(chosen)] if len(kept) > len(chosen) else ports.pick({*taken, *chosen, *kept}))
        return tuple(chosen)

    def _spawn(self, site: Site, launch: Launch) -> Running:
        self._report(f"starting {site.name}")
        identity = spawn(launch, site.data, site.log, self._user(site.name), tied=self._tied)
        address = self._servers[site.name].address(site)
        running = Running(
            site.name, site.port, identity.pid, identity.started, site.log, site.data, address, site.ports
        )
        self._records.write(running, launch.stop)
        return running

    def _await(self, site: Site) -> None:
        server = self._servers[site.name]
        deadline = time.monotonic() + server.patience
        pause = 0.02
        while not server.ready(site):
            if site.name not in self._records.running():
                raise EnvironmentFault(f"{site.name} ended while starting: {_last_line(site.log)}", f"See {site.log}")
            if time.monotonic() > deadline:
                raise EnvironmentFault(f"{site.name} was not ready after {server.patience:.0f} s.", f"See {site.log}")
            if self._stop_waiting.wait(pause):
                return
            pause = min(0.25, pause * 1.3)
        self._report(f"{site.name} is ready on port {site.port}")

    def _in_parallel(self, work: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Run all at once; the first error, or Ctrl-C, stops the others from waiting."""
        self._stop_waiting.clear()
        with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                failed = [future for future in wait(futures, return_when=FIRST_EXCEPTION).done if future.exception()]
                for future in failed or futures:
                    future.result()
            except BaseException:
                self._stop_waiting.set()
                raise
            return [future.result() for future in futures]

    # -- ending

    def _end(self, running: Running, how: signal.Signals | None = None) -> None:
        stop = how or self._records.stop_signal(running.name)
        end(Identity(running.pid, running.started), stop, patience=30)
        self._report(f"{running.name} stopped")

    def _end_strays(self, name: str) -> None:
        """End processes in the server's folder that an `up` started but did not record before it died."""
        folder = self.home / name
        if folder.exists():
            for stray in list(inside(folder.resolve())):
                end(stray, signal.SIGTERM, patience=10)


def _require_same_ports(found: Mapping[str, Running], requested: Mapping[str, int]) -> None:
    for name, port in requested.items():
        if name in found and found[name].port != port:
            raise EnvironmentFault(
                f"{name} already runs on port {found[name].port}, not {port}.", "Stop it first: millrace local down"
            )


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        # an indented line belongs to a stack trace; the reason is above it
        lines = [
            line for line in log.read_text(errors="replace").splitlines() if line.strip() and not line[0].isspace()
        ]
        return lines[-1][:300] if lines else "no message"
    return "no message"

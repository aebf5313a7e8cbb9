"""Real servers on this machine, as processes of ours: started together, found again, stopped without a trace.

State folder: `<home>/<server>/` is a server's data, `<home>/private/` what only we may read, `<home>/logs/` what the
servers say, `<home>/records/` which process is which. A record is written right after the fork, before the server is
ready, so whatever `up` has started when it is killed, the next `up` or `down` finds.
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
from cdc.artifacts.account import account
from cdc.artifacts.downloads import locked
from cdc.artifacts.progress import Narrate, silent
from cdc.errors import ConfigError, EnvironmentFault
from deploy.local import ports
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


def known_servers() -> dict[str, Server]:
    """Every server that can be asked for, by name."""
    every: tuple[Server, ...] = (Postgres(), Redis(), OpenSearch(), Kafka(), Connect())
    return {server.name: server for server in every}


class Servers:
    """The servers of one state folder.

    With `tied`, they die with the calling thread (for tests and foreground owners); otherwise they run on in the
    background until `down`. Two processes may call at the same time: they take turns.
    """

    def __init__(
        self, home: Path, servers: Mapping[str, Server] | None = None, *, tied: bool = False, narrate: Narrate = silent
    ) -> None:
        self.home = home.absolute()
        self._servers = dict(servers or known_servers())
        self._tied = tied
        self._narrate = narrate
        self._records = Records(self.home / "records")
        self._halt = threading.Event()

    def up(self, names: Sequence[str] = STANDARD, requested: Mapping[str, int] | None = None) -> dict[str, Running]:
        """Start what does not run yet, together; returns when all of them (and what they need) are ready.

        `requested` names ports to insist on. If anything fails, what this call has started is stopped again.
        """
        wanted = self._with_needs(names)
        folders.make(self.home, 0o711)
        for part in ("private", "logs", "records"):
            folders.make(self.home / part, 0o700)
        with locked(self.home / "lock"):
            found = self._records.running()
            _refuse_to_move(found, requested or {})
            missing = [name for name in wanted if name not in found]
            self._in_parallel(lambda name: self._servers[name].install(self._narrate), missing)
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
        """Stop them (all, if none are named), those that need others first. Returns the names of what was stopped.

        `how` is another signal than the one for a tidy end: SIGKILL is what a crash does. Data stays in any case.
        """
        if not self.home.is_dir():
            return []
        with locked(self.home / "lock"):
            running = self._records.running()
            stopping = [name for name in reversed(self._servers) if name in running and name in (names or running)]
            for name in stopping:
                self._end(running[name], how)
            for name in names or self._servers:
                self._end_strays(name)
            return stopping

    def private(self) -> Path:
        """Where passwords lie."""
        return self.home / "private"

    # -- starting

    def _with_needs(self, names: Sequence[str]) -> list[str]:
        wanted: list[str] = []
        for name in names:
            if name not in self._servers:
                raise ConfigError(f"There is no local server `{name}`.", f"Choose from {', '.join(self._servers)}.")
            wanted += [need for need in (*self._with_needs(self._servers[name].after), name) if need not in wanted]
        return wanted

    def _start_in_order(self, missing: Sequence[str], requested: Mapping[str, int], started: list[Running]) -> None:
        """In waves: whatever waits for nothing that is still missing starts together."""
        while missing:
            wave = [name for name in missing if not set(self._servers[name].after) & set(missing)]
            self._start(wave, requested, started)
            missing = [name for name in missing if name not in wave]

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
            robbed = [site.name for site in sites if self._was_robbed(site) and site.name not in requested]
            if again or not robbed:
                raise
            self._start(robbed, requested, started, again=True)
            self._in_parallel(self._await, [site for site in sites if site.name not in robbed])

    def _was_robbed(self, site: Site) -> bool:
        """It is dead and somebody else listens on its port: he was quicker between our choice and our start."""
        return site.name not in self._records.running() and not all(ports.free(port) for port in site.ports)

    def _sites(self, names: Sequence[str], requested: Mapping[str, int]) -> list[Site]:
        taken: set[int] = set(requested.values())
        sites = []
        for name in names:
            chosen = self._ports(name, requested.get(name), taken)
            taken.update(chosen)
            sites.append(self._site(name, folders.data_folder(self.home, name, account()), chosen))
        return sites

    def _site(self, name: str, data: Path, chosen: tuple[int, ...]) -> Site:
        running = self._records.running()
        peers = {need: running[need] for need in self._servers[name].after if need in running}
        return Site(name, data, self.private(), self.home / "logs" / f"{name}.log", chosen, peers)

    def _site_of(self, running: Running) -> Site:
        return self._site(running.name, running.data, running.ports)

    def _ports(self, name: str, requested: int | None, taken: set[int]) -> tuple[int, ...]:
        """The requested port, else those of last time, so that settings made by hand stay right, else free ones."""
        if requested is not None and not ports.free(requested):
            raise EnvironmentFault(
                f"Port {requested}, asked for {name}, is taken.", "Stop what listens there or ask for another port."
            )
        last = self._records.last(name)
        kept = [port for port in (last.ports if last else ()) if port not in taken and ports.free(port)]
        chosen: list[int] = [] if requested is None else [requested]
        while len(chosen) < self._servers[name].port_count:
            chosen.append(kept[len(chosen)] if len(kept) > len(chosen) else ports.pick({*taken, *chosen, *kept}))
        return tuple(chosen)

    def _spawn(self, site: Site, launch: Launch) -> Running:
        self._narrate(f"starting {site.name}")
        identity = spawn(launch, site.data, site.log, account(), tied=self._tied)
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
                raise EnvironmentFault(f"{site.name} ended while starting: {_last_words(site.log)}", f"See {site.log}")
            if time.monotonic() > deadline:
                raise EnvironmentFault(f"{site.name} was not ready after {server.patience:.0f} s.", f"See {site.log}")
            if self._halt.wait(pause):
                return
            pause = min(0.25, pause * 1.3)
        self._narrate(f"{site.name} is ready on port {site.port}")

    def _in_parallel(self, work: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """All at once; the first error, or a Ctrl-C, ends the waiting of the others."""
        self._halt.clear()
        with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                failed = [future for future in wait(futures, return_when=FIRST_EXCEPTION).done if future.exception()]
                for future in failed or futures:
                    future.result()
            except BaseException:
                self._halt.set()
                raise
            return [future.result() for future in futures]

    # -- ending

    def _end(self, running: Running, how: signal.Signals | None = None) -> None:
        stop = how or self._records.stop_signal(running.name)
        end(Identity(running.pid, running.started), stop, patience=30)
        self._narrate(f"{running.name} stopped")

    def _end_strays(self, name: str) -> None:
        """Whatever still works in the server's folder: started by an `up` that died before it could note the pid."""
        place = self.home / name
        if place.exists():
            for stray in list(inside(place.resolve())):
                end(stray, signal.SIGTERM, patience=10)


def _refuse_to_move(found: Mapping[str, Running], requested: Mapping[str, int]) -> None:
    for name, port in requested.items():
        if name in found and found[name].port != port:
            raise EnvironmentFault(
                f"{name} already runs on port {found[name].port}, not {port}.", "Stop it first: millrace local down"
            )


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        # a line that is indented belongs to a stack trace, whose reason stands above it
        lines = [
            line for line in log.read_text(errors="replace").splitlines() if line.strip() and not line[0].isspace()
        ]
        return lines[-1][:300] if lines else "it said nothing"
    return "it said nothing"

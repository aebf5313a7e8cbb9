"""`millrace run`: the lock, the endpoint and the supervised parts, and what makes them change while they run."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cdc import log_output
from cdc.config.settings import Settings
from cdc.errors import MillraceError
from cdc.service.daemon import signals
from cdc.service.daemon.budgets import DiskBudget, MemoryBudget, limits_of
from cdc.service.daemon.process import secrets_in, settings_from
from cdc.service.daemon.reload import Plan, plan
from cdc.service.daemon.supervisor import StateLock, Supervisor, parts_of
from cdc.service.http.server import Server
from cdc.service.state import status

_EVERY = 1.0
_log = logging.getLogger(__name__)


def run(config: Path, log_format: log_output.LogFormat, log_level: str) -> int:
    """Run a pipeline until SIGTERM or SIGINT; SIGHUP reads the file again. Returns the exit code."""
    settings = settings_from(config)

    def configure(settings: Settings) -> None:
        log_output.configure("daemon", log_format, log_level, secrets_in(settings))

    configure(settings)
    stop, again = threading.Event(), threading.Event()
    signals.hear({signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: again})
    with StateLock(settings.state), HttpFront(settings) as front:
        supervisor = Supervisor(parts_of(config, log_format, log_level))
        daemon = Daemon(config, settings, supervisor, front, again, configure)
        supervisor.beat = daemon.beat
        code = supervisor.run(stop)
        daemon.publish("stopped")
        return code


class HttpFront:
    """The HTTP server; another one when its own settings change."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._server = Server(settings)

    def __enter__(self) -> "HttpFront":
        self._server.__enter__()
        http = self._settings.http
        _log.info("health on http://%s:%d/readyz", http.host, http.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def show(self, settings: Settings) -> None:
        """Serve another pipeline file. Falls back to the old one, and raises, where the new address is refused."""
        if settings.http == self._settings.http:
            self._settings = settings
            return self._server.follow(settings)
        before = self._settings
        self._server.__exit__()
        try:
            self._begin(settings)
        except MillraceError:
            self._begin(before)
            raise

    def _begin(self, settings: Settings) -> None:
        self._settings, self._server = settings, Server(settings)
        self.__enter__()


@dataclass(slots=True)
class Daemon:
    """What the daemon itself does between looking after its parts."""

    config: Path
    settings: Settings
    supervisor: Supervisor
    front: HttpFront
    again: threading.Event
    configure: Callable[[Settings], None]
    _due: float = 0.0
    _reload: dict[str, object] = field(default_factory=dict)
    _memory: MemoryBudget = field(init=False)
    _disk: DiskBudget = field(init=False)

    def __post_init__(self) -> None:
        self._budget()

    def _budget(self) -> None:
        names = [part.name for part in self.supervisor.parts]
        self._memory = MemoryBudget(limits_of(self.settings.budgets, names))
        self._disk = DiskBudget(self.settings.state, self.settings.budgets)

    def beat(self) -> None:
        """Read the file again where asked, and once a second look at the budgets and say how things stand."""
        if self.again.is_set():
            self.again.clear()
            self._read_again()
            self._due = 0.0
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _EVERY
            self.publish("running")

    def publish(self, state: str) -> None:
        """Replace the daemon's status file. A full disk leaves the old one, whose age tells."""
        parts = {part.name: part.facts() for part in self.supervisor.parts}
        for name, facts in parts.items():
            resident = facts["rss_bytes"]
            if isinstance(resident, int) and (reason := self._memory.judge(name, resident, self._progress(name))):
                self.supervisor.restart(name, reason)
            facts["over_memory"] = self._memory.excess.get(name, "")
        with suppress(OSError):
            facts = {"state": state, "parts": parts, "disk": asdict(self._disk.look()), "reload": self._reload}
            status.publish(self.settings.state, "daemon", facts)

    def _progress(self, part: str) -> object:
        """What moves as a part comes further: the end of the log, or what the sinks have reached."""
        said = status.read(self.settings.state, part)
        if part == "capture":
            return said.get("durable")
        sinks = said.get("sinks")
        known = sinks.items() if isinstance(sinks, dict) else ()
        return {name: facts.get("reached") for name, facts in known if isinstance(facts, dict)} or None

    def _read_again(self) -> None:
        try:
            after = settings_from(self.config)
            found = plan(self.settings, after)
            self._take_over(after, found)
        except MillraceError as error:
            _log.error("The pipeline file is not taken over; everything runs on as before: %s", error)
            self._outcome(False, str(error), ())
            return
        said = "; ".join(found.changes) or "nothing changed"
        _log.info("The pipeline file was read again: %s", said)
        self._outcome(True, said, found.changes)

    def _take_over(self, after: Settings, found: Plan) -> None:
        self.front.show(after)
        self.configure(after)
        self.settings = after
        self._budget()
        for name in sorted(found.restart):
            self.supervisor.restart(name, "the pipeline file changed")
        for name in sorted(found.tell):
            self.supervisor.tell(name)

    def _outcome(self, ok: bool, message: str, changes: tuple[str, ...]) -> None:
        now = datetime.now(UTC).isoformat()
        self._reload = {"at": now, "ok": ok, "message": message, "changed": list(changes)}

"""`millrace run`: the lock, the HTTP endpoint, the supervised parts, and reloads of the pipeline file."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cdc import log_output
from cdc.config.settings import Settings
from cdc.errors import MillraceError, TakenOver
from cdc.fence import guard, start
from cdc.service.daemon import signals
from cdc.service.daemon.budgets import DiskBudget, MemoryBudget, limits_of
from cdc.service.daemon.process import secrets_in, settings_from
from cdc.service.daemon.reload import Plan, plan
from cdc.service.daemon.supervisor import ChildProcess, StateLock, Supervisor, parts_of
from cdc.service.http.server import Server
from cdc.service.standby.holder import LeaseHolder
from cdc.service.standby.lease import Lease
from cdc.service.standby.waiting import Standby, acquire
from cdc.service.state import status

_STATUS_SECONDS = 1.0
_log = logging.getLogger(__name__)


def run(config: Path, log_format: log_output.LogFormat, log_level: str, *, standby: bool = False) -> int:
    """Run a pipeline until SIGTERM or SIGINT; SIGHUP reads the file again. Returns the exit code.

    A `standby` waits while another daemon is active. Raises TakenOver when another one has become active.
    """
    settings = settings_from(config)

    def configure(settings: Settings) -> None:
        log_output.configure("daemon", log_format, log_level, secrets_in(settings))

    configure(settings)
    stop, again = threading.Event(), threading.Event()
    signals.set_on_signal({signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: again})
    parts = parts_of(config, log_format, log_level)
    _want_views(parts, settings)
    with ExitStack() as stack:
        if standby:
            front = stack.enter_context(HttpFront(settings))
            lease = _wait(settings, front, parts, stop)
            if lease is None:
                return 0
            settings = settings_from(config)  # it may have changed meanwhile
            configure(settings)
            _want_views(parts, settings)
            front.show(settings)
            stack.enter_context(StateLock(settings.state))
        else:
            stack.enter_context(StateLock(settings.state))
            front = stack.enter_context(HttpFront(settings))
            lease = acquire(settings.state)
        supervisor = Supervisor(parts)
        holder = stack.enter_context(_holder(lease, settings, supervisor, stop))
        daemon = Daemon(config, settings, supervisor, front, again, configure, holder)
        supervisor.on_turn = daemon.on_turn
        code = supervisor.run(stop)
        if holder.lost:
            raise TakenOver(
                f"This daemon stopped: {holder.reason}.",
                "Nothing is lost. To wait for the next take-over, start it with: millrace run --standby",
            )
        daemon.publish("stopped")
        return code


def _want_views(parts: Sequence[ChildProcess], settings: Settings) -> None:
    for part in parts:
        if part.name == "views":
            part.wanted = bool(settings.views)


def _wait(settings: Settings, front: "HttpFront", parts: Sequence[ChildProcess], stop: threading.Event) -> Lease | None:
    """Wait as a standby with the parts loaded, while the endpoint says so."""
    standby = Standby(settings)
    front.show_standby(lambda: standby.holder)
    for part in parts:
        if part.wanted:
            part.load()
    try:
        lease = standby.wait(stop)
    finally:
        front.show_standby(None)
    if lease is None:
        for part in parts:
            part.unload()
    return lease


def _holder(lease: Lease, settings: Settings, supervisor: Supervisor, stop: threading.Event) -> LeaseHolder:
    """Holds the lease, for this process and for the parts that it starts."""
    os.environ[guard.LEASE] = str(lease.path)
    os.environ[start.TAKEN_OVER] = "1" if lease.record.taken_from else ""

    def end() -> None:
        supervisor.kill()
        stop.set()

    return LeaseHolder(lease, settings.state, settings.source, end)


class HttpFront:
    """The HTTP server; replaced when its own settings change."""

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

    def show_standby(self, active: Callable[[], str] | None) -> None:
        """Say that this daemon waits for another one, whose name `active` returns; None: it does not."""
        self._server.show_standby(active)

    def show(self, settings: Settings) -> None:
        """Serve other settings. If the new address cannot be used, keeps the old one and raises."""
        if settings.http == self._settings.http:
            self._settings = settings
            return self._server.follow(settings)
        before = self._settings
        self._server.__exit__()
        try:
            self._start(settings)
        except MillraceError:
            self._start(before)
            raise

    def _start(self, settings: Settings) -> None:
        self._settings, self._server = settings, Server(settings)
        self.__enter__()


@dataclass(slots=True)
class Daemon:
    """What the daemon itself does besides supervising its parts: reloads, budgets, status."""

    config: Path
    settings: Settings
    supervisor: Supervisor
    front: HttpFront
    again: threading.Event
    configure: Callable[[Settings], None]
    holder: LeaseHolder
    _due: float = 0.0
    _reload: dict[str, object] = field(default_factory=dict)
    _memory: MemoryBudget = field(init=False)
    _disk: DiskBudget = field(init=False)

    def __post_init__(self) -> None:
        self._reset_budgets()

    def _reset_budgets(self) -> None:
        names = [part.name for part in self.supervisor.parts]
        self._memory = MemoryBudget(limits_of(self.settings.budgets, names))
        self._disk = DiskBudget(self.settings.state, self.settings.budgets)

    def on_turn(self) -> None:
        """Reload the file if requested; once a second check the budgets and publish the status."""
        if self.again.is_set():
            self.again.clear()
            self._reload_file()
            self._due = 0.0
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _STATUS_SECONDS
            self.publish("running")

    def publish(self, state: str) -> None:
        """Replace the daemon's status file. On a full disk the old one stays; readers see its age."""
        parts = {part.name: part.facts() for part in self.supervisor.parts if part.wanted}
        for name, facts in parts.items():
            resident = facts["rss_bytes"]
            progress = self._progress(name)
            if isinstance(resident, int) and (reason := self._memory.restart_reason(name, resident, progress)):
                self.supervisor.restart(name, reason)
            facts["over_memory"] = self._memory.excess.get(name, "")
        with suppress(OSError):
            facts = {"state": state, "parts": parts, "disk": asdict(self._disk.measure()), "reload": self._reload}
            if not self.holder.lost:  # else it is the file of the daemon that took over
                status.publish(self.settings.state, "daemon", {**facts, "lease": self.holder.facts()})

    def _progress(self, part: str) -> object:
        """What changes when a part advances: the head of the log, or the positions of sinks or views."""
        reported = status.read(self.settings.state, part)
        if part == "capture":
            return reported.get("durable")
        section, position = ("views", "lsn") if part == "views" else ("sinks", "reached")
        several = reported.get(section)
        known = several.items() if isinstance(several, dict) else ()
        return {name: facts.get(position) for name, facts in known if isinstance(facts, dict)} or None

    def _reload_file(self) -> None:
        try:
            after = settings_from(self.config)
            found = plan(self.settings, after)
            self._apply(after, found)
        except MillraceError as error:
            _log.error("The changed pipeline file is not used; everything runs as before: %s", error)
            self._record_reload(False, str(error), ())
            return
        summary = "; ".join(found.changes) or "nothing changed"
        _log.info("The pipeline file was reloaded: %s", summary)
        self._record_reload(True, summary, found.changes)

    def _apply(self, after: Settings, found: Plan) -> None:
        self.front.show(after)
        self.configure(after)
        self.settings = after
        self._reset_budgets()
        self.supervisor.want("views", bool(after.views))
        for name in sorted(found.restart):
            self.supervisor.restart(name, "the pipeline file changed")
        for name in sorted(found.reload):
            self.supervisor.reload(name)

    def _record_reload(self, ok: bool, message: str, changes: tuple[str, ...]) -> None:
        now = datetime.now(UTC).isoformat()
        self._reload = {"at": now, "ok": ok, "message": message, "changed": list(changes)}

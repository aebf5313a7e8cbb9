"""Polls the pipeline in a thread of its own, so that no HTTP request waits for the log, the disk or a store.

Promise: `seen` is available at once, and says how old it is. One poll serves every request and every waiting client.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from cdc.config.settings import Settings
from cdc.errors import LogError, MillraceError
from cdc.model import ZERO_LSN, Lsn
from cdc.ports import LogReader
from cdc.service.observe.disk_forecast import DiskForecast
from cdc.service.observe.health import Reason, reasons
from cdc.service.observe.lag import NO_LAG, LagInputs, Lags, SinkLag
from cdc.service.observe.positions import Positions, open_log, watermark_of
from cdc.service.observe.uncovered import PipelineProgress
from cdc.service.state import status
from cdc.service.state.sink_positions import SinkPosition

_EVERY = 1.0
_FAST = 0.02  # while a client waits for a sink; a poll takes well below a millisecond
_HANGS = "Check the log's server, or the disk of the state folder."
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the last poll found. `slot_seconds` is the time until the source may drop the slot's WAL, `disk_seconds` the
    time until the state folder's disk is full."""

    at: float = 0.0
    capture: status.Facts = field(default_factory=dict)
    apply: status.Facts = field(default_factory=dict)
    views: status.Facts = field(default_factory=dict)
    daemon: status.Facts = field(default_factory=dict)
    head: Lsn = ZERO_LSN
    positions: Mapping[str, SinkPosition] = field(default_factory=dict)
    view_reached: Mapping[str, Lsn] = field(default_factory=dict)
    dead_letters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    capture_lag: SinkLag = NO_LAG
    sink_lags: Mapping[str, SinkLag] = field(default_factory=dict)
    table_lags: Mapping[tuple[str, str], SinkLag] = field(default_factory=dict)
    view_lags: Mapping[str, SinkLag] = field(default_factory=dict)
    slot_room: int | None = None
    slot_seconds: float = float("inf")
    disk_free: int = 0
    disk_seconds: float = float("inf")
    trouble: str = ""
    standby: bool = False
    """Whether this daemon only waits; everything else is then what the active one reports."""

    @property
    def watermark(self) -> Lsn:
        """The LSN up to which capture knows that the log is complete."""
        return watermark_of(self.capture)

    @property
    def reached(self) -> dict[str, Lsn]:
        """The LSN up to which each sink has every table, held-back ones included."""
        return {name: position.reached for name, position in self.positions.items()}

    @property
    def progress(self) -> PipelineProgress:
        """How far the pipeline is."""
        positions, letters = self.positions, self.dead_letters
        return PipelineProgress(self.capture, self.apply, positions, self.head, self.watermark, letters, self.views)

    def reasons(self, sinks: Sequence[str]) -> list[Reason]:
        """Why the pipeline is not ready now. An old observation is a reason of its own."""
        old = time.time() - self.at
        if self.at and old > status.SILENT_AFTER:  # a poll takes that long only if the log or the disk hangs
            return [Reason("log", f"has not answered for {old:.0f} s; the figures shown are that old", _HANGS)]
        now, views = datetime.now(UTC), self.view_reached
        found = reasons(self.capture, self.apply, tuple(sinks), now, views=self.views, view_names=views)
        if self.trouble:
            found.append(Reason("log", self.trouble))
        return found


class Observer:
    """Polls once a second, and fifty times a second while a client waits. Calls `changed` when a position moved."""

    def __init__(self, settings: Settings, changed: Callable[[], None] = lambda: None) -> None:
        self.seen = Observation()
        self.changed = changed
        self.active_elsewhere: Callable[[], str] | None = None
        """While this daemon is a standby: the name of the one that is active."""
        self.samplers: list[Callable[[Observation], None]] = []
        self._slot, self._disk, self._lags = DiskForecast(), DiskForecast(), Lags()
        self._waiting = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self.follow(settings)

    def follow(self, settings: Settings) -> None:
        """Use these settings; also called after a reload."""
        self.settings = settings
        self.sinks = tuple(sink.name for sink in settings.sinks)
        self._reader: LogReader | None = None
        self._positions: Positions | None = None

    @property
    def reader(self) -> LogReader:
        """The log. Raises LogError if it cannot be opened."""
        if self._reader is None:
            self._reader = open_log(self.settings)
        return self._reader

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling."""
        self._stop.set()
        self._wake.set()
        self._thread.join(5)

    @contextmanager
    def polling_fast(self) -> Iterator[None]:
        """Poll fifty times a second while the block runs. Only for the one thread that answers requests."""
        self._waiting += 1
        self._wake.set()
        try:
            yield
        finally:
            self._waiting -= 1

    def poll(self) -> None:
        """Read everything once."""
        self._poll_positions()
        now, seen = time.time(), self.seen
        positions, views = seen.positions, seen.view_reached
        self._lags.update(LagInputs(now, seen.capture, seen.head, seen.reached, self._tables(), positions, views))
        free = shutil.disk_usage(self.settings.state).free if self.settings.state.exists() else 0
        self._disk.add(now, free)
        room = self._slot_room(seen.capture)
        self._slot.add(now, room if room is not None else 0)
        self.seen = replace(
            seen,
            capture_lag=self._lags.capture,
            sink_lags=self._lags.sinks,
            table_lags=self._lags.tables,
            view_lags=self._lags.views,
            slot_room=room,
            slot_seconds=self._slot.seconds() if room is not None else float("inf"),
            disk_free=free,
            disk_seconds=self._disk.seconds(),
            standby=self.active_elsewhere is not None,
        )
        for sample in self.samplers:
            sample(self.seen)

    def _poll_positions(self) -> None:
        state, seen = self.settings.state, self.seen
        daemon = status.read(state, "daemon")
        try:
            if self._positions is None:
                self._positions = Positions(self.settings, self.reader)
            now, trouble = self._positions.progress(), ""
        except LogError as error:
            capture, apply, views = (status.read(state, part) for part in ("capture", "apply", "views"))
            views = views if self.settings.views else {}
            now, trouble = replace(seen.progress, capture=capture, apply=apply, views=views), str(error)
        moved = (now.positions, now.head, now.watermark) != (seen.positions, seen.head, seen.watermark)
        self.seen = replace(
            seen,
            at=time.time(),
            capture=now.capture,
            apply=now.apply,
            views=now.views,
            daemon=daemon,
            head=now.head,
            positions=now.positions,
            view_reached=self._positions.views.reached if self._positions is not None else seen.view_reached,
            dead_letters=now.dead_letters,
            trouble=trouble,
        )
        if moved:
            self.changed()

    def _tables(self) -> dict[str, list[str]]:
        return {sink.name: [str(table) for table in self.settings.tables_of(sink)] for sink in self.settings.sinks}

    def _slot_room(self, capture: status.Facts) -> int | None:
        """WAL that may still be written before the slot is lost or the source's disk is full; None if unknown."""
        safe, retained = capture.get("slot_safe_bytes"), capture.get("slot_retained_bytes")
        rooms = [safe] if isinstance(safe, int) else []
        if self.settings.source.wal_room_gb and isinstance(retained, int):
            rooms.append(max(0, int(self.settings.source.wal_room_gb * 1e9) - retained))
        return min(rooms, default=None)

    def _run(self) -> None:
        due = 0.0
        while not self._stop.is_set():
            try:
                if time.monotonic() >= due:
                    due = time.monotonic() + _EVERY
                    self.poll()
                else:
                    self._poll_positions()
            except (MillraceError, OSError) as error:
                _log.debug("the pipeline could not be polled: %s", type(error).__name__)
            except Exception:
                _log.exception("the pipeline could not be polled")
            self._wake.clear()
            if self._waiting:
                self._stop.wait(_FAST)
            else:
                self._wake.wait(_EVERY)

"""Keeps the lease of the active daemon, and stops the daemon when it may no longer be active.

Two threads, since a shared file system may block the one that renews: the other only counts time. The daemon stops as
soon as its lease is gone. While a standby waits, it also stops when it could not renew for RENEW_WITHIN seconds, less
than the time after which a standby takes over.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cdc.config.settings import SourceSettings
from cdc.service.standby.lease import Lease, LeaseTaken
from cdc.service.standby.source_probe import SourceProbe
from cdc.service.state import status

RENEW_EVERY = 1.0
RENEW_WITHIN = 4.0
_TICK = 0.25
_PRESENT_SECONDS = 10.0
STANDBY = "standby-"
"""How the names of the standbys' status files begin."""
_log = logging.getLogger(__name__)


class LeaseHolder:
    """Renews inside a `with` block. Calls `on_lost` once, from another thread, when the daemon must stop."""

    def __init__(self, lease: Lease, state: Path, source: SourceSettings, on_lost: Callable[[], None]) -> None:
        self._lease = lease
        self._standbys = Standbys(state)
        self._source = source
        self._probe: SourceProbe | None = None
        self._on_lost = on_lost
        self._ticks = 0
        self._stop = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.reason = ""
        """Why the lease was lost; empty while it is held."""

    def __enter__(self) -> "LeaseHolder":
        self._renewing.start()
        threading.Thread(target=self._count_time, name="lease-time", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._probe is not None:
            self._probe.stop()
        self._renewing.join(RENEW_WITHIN)

    def facts(self) -> Mapping[str, object]:
        """For the daemon's status."""
        record = self._lease.record
        return {
            "number": record.number,
            "holder": str(record.holder),
            "takeovers": record.takeovers,
            "taken_from": record.taken_from,
            "standbys": sorted(self._standbys.present()),
        }

    @property
    def lost(self) -> bool:
        """Whether the daemon must not write any more."""
        if not self.reason and self._lease.lost:
            self._lose("another daemon has taken over this pipeline")
        return bool(self.reason)

    def _renew(self) -> None:
        """Releases the lease at the end: in this thread, or a renewal under way could undo it."""
        while not self._stop.is_set() and not self.reason:
            try:
                self._lease.renew(self._source_lost())
                self._ticks = 0
            except LeaseTaken:
                self._lose("another daemon has taken over this pipeline")
            except OSError as error:
                _log.warning("The lease %s could not be renewed: %s", self._lease.path, error.strerror)
            self._stop.wait(RENEW_EVERY)
        if not self.reason:
            with suppress(OSError, LeaseTaken):
                self._lease.release()

    def _source_lost(self) -> float | None:
        """Asks the source only while a standby could make use of the answer."""
        self._standbys.look()
        if not self._standbys.present():
            return None
        if self._probe is None:
            self._probe = SourceProbe(self._source)
            self._probe.start()
        return None if self._probe.answers else round(self._probe.silent_for, 1)

    def _count_time(self) -> None:
        """Counts its own turns, not the clock: after a freeze the renewing thread first finds out who has the lease."""
        while not self._stop.wait(_TICK) and not self.reason:
            self._ticks += 1
            if self._ticks * _TICK > RENEW_WITHIN and self._standbys.present():
                self._lose(f"the lease could not be renewed for {RENEW_WITHIN:g} s, and a standby may take over")

    def _lose(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self._on_lost()


class Standbys:
    """The standbys of a pipeline, by their status files. Compares no clocks: a file that changes is a live standby."""

    def __init__(self, state: Path) -> None:
        self._folder = status.folder(state)
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self) -> None:
        """Look at the files once."""
        now = time.monotonic()
        found: dict[str, tuple[int, float]] = {}
        for path in self._folder.glob(f"{STANDBY}*.json") if self._folder.is_dir() else ():
            with suppress(OSError):
                changed = path.stat().st_mtime_ns
                before = self._seen.get(path.stem)
                if before is None:
                    found[path.stem] = changed, now - _PRESENT_SECONDS  # it counts when it changes
                else:
                    found[path.stem] = before if before[0] == changed else (changed, now)
        self._seen = found

    def present(self) -> list[str]:
        """The names of those that changed lately."""
        now = time.monotonic()
        return [name for name, (_, changed) in self._seen.items() if now - changed < _PRESENT_SECONDS]

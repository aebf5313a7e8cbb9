"""A daemon that waits for the lease: when may it take over, and what it does first.

`reason_to_take` is pure. A holder is judged by this process's own clock: the time since its record last changed. So the
clocks of two machines are never compared.
"""

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cdc.config.settings import Settings
from cdc.durable_files import remove
from cdc.errors import EnvironmentFault
from cdc.service.standby.holder import STANDBY
from cdc.service.standby.lease import Lease, LeaseTaken, Record, current, here
from cdc.service.standby.source_probe import SourceProbe
from cdc.service.state import status

EXPIRES_AFTER = 6.0
"""Seconds without a renewal after which a lease may be taken over. More than `holder.RENEW_WITHIN`."""
SOURCE_LOST_FOR = 5.0
"""Seconds without the source after which a holder is replaced by a standby that reaches it."""
_LOOK_EVERY = 0.5
_STATUS_EVERY = 1.0
_LET_END = 1.0
"""How long a holder that may be alive gets to find its lease gone: its processes look twice a second."""
_LOCKS = ("log/lock", "log/schemas/lock", "checkpoints/*.lock")
_log = logging.getLogger(__name__)


def reason_to_take(lease: Record | None, unchanged: float, source_answers: bool) -> str | None:
    """Why a standby takes the lease now: empty if nobody has it, None if it must wait."""
    if lease is None or lease.released:
        return ""
    if lease.holder.known_dead:
        return f"{lease.holder} has ended"
    if unchanged > EXPIRES_AFTER:
        return f"{lease.holder} has not renewed its lease for {EXPIRES_AFTER:g} s"
    if source_answers and (lease.source_lost or 0.0) > SOURCE_LOST_FOR:
        return f"{lease.holder} has not reached the source for {SOURCE_LOST_FOR:g} s, and this machine does"
    return None


@dataclass(slots=True)
class LeaseWatch:
    """Looks at the lease, and knows how long it has not changed."""

    state: Path
    _seen: Record | None = None
    _changed: float = 0.0

    def look(self) -> tuple[Record | None, float]:
        """The lease, and for how many seconds this watch has seen it unchanged."""
        now, record = time.monotonic(), current(self.state)
        if record != self._seen or not self._changed:
            self._seen, self._changed = record, now
        return record, now - self._changed


class Standby:
    """Waits for the lease of a pipeline."""

    def __init__(self, settings: Settings) -> None:
        self._state = settings.state
        self._watch = LeaseWatch(settings.state)
        self._probe = SourceProbe(settings.source)
        self._name = f"{STANDBY}{here().host}-{here().pid}"
        self._due = 0.0
        self.holder = ""
        """The daemon that is active, for people."""

    def wait(self, stop: threading.Event) -> Lease | None:
        """Return the lease once this process has it and the earlier holder has been fenced off; None after `stop`."""
        self._probe.start()
        try:
            while not stop.is_set():
                if (lease := self._turn()) is not None:
                    return lease
                stop.wait(_LOOK_EVERY)
            return None
        finally:
            self._probe.stop()
            (status.folder(self._state) / f"{self._name}.json").unlink(missing_ok=True)

    def _turn(self) -> Lease | None:
        record, unchanged = self._watch.look()
        reason = reason_to_take(record, unchanged, self._probe.answers)
        if reason is not None:
            with suppress(LeaseTaken):  # another standby was faster
                lease = take_over(self._state, record, reason)
                remove(self._state / "lock")  # that of the daemon itself, for the same reason as those of its parts
                return lease
        self._show(record)
        return None

    def _show(self, record: Record | None) -> None:
        holder = "" if record is None else str(record.holder)
        if holder != self.holder:
            _log.info("standby: %s is active", holder)
            self.holder = holder
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _STATUS_EVERY
            facts = {"state": "standby", "active": holder, "host": here().host, "source_answers": self._probe.answers}
            with suppress(OSError):  # a full disk: the holder then does not see this standby
                status.publish(self._state, self._name, facts)


def acquire(state: Path) -> Lease:
    """The lease for a daemon that does not wait. Raises EnvironmentFault while another daemon renews it.

    The daemon has the lock of the state folder: but locks of some network file systems do not reach other machines, and
    a daemon that took over from a frozen one may be active.
    """
    watch = LeaseWatch(state)
    first, _ = watch.look()
    while True:
        record, unchanged = watch.look()
        try:
            if record is None or record.released or record.holder.known_dead:
                return Lease.take(state, record)
            if (reason := reason_to_take(record, unchanged, source_answers=False)) is not None:
                return take_over(state, record, reason)
        except LeaseTaken:
            continue
        if record != first:
            raise EnvironmentFault(
                f"Another millrace ({record.holder}) already runs on the state folder {state}.",
                "Stop that one first, give this pipeline a state folder of its own, or let this one wait: "
                "millrace run --standby",
            )
        time.sleep(_LOOK_EVERY)


def take_over(state: Path, before: Record | None, reason: str) -> Lease:
    """Take the lease and fence the earlier holder off. Raises LeaseTaken."""
    lease = Lease.take(state, before, reason)
    if reason and before is not None:
        _log.warning("taking over: %s", reason)
        replace_locks(state)
        if not before.holder.known_dead:
            time.sleep(_LET_END)
    return lease


def replace_locks(state: Path) -> None:
    """Remove the lock files of the parts: a frozen process keeps its locks on files that nobody finds any more.

    Safe only after the earlier holder's lease is gone: these locks say who came first, the lease says who may write.
    """
    for pattern in _LOCKS:
        for path in state.glob(pattern):
            remove(path)

"""Limits on disk space for the state folder and on memory for the parts.

Over the disk budget the log accepts no more rows: capture stops reading, the slot keeps the WAL, the status says so,
and capture continues by itself once there is space. A part over its memory budget is restarted: its data is in the log.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cdc.config.settings import BudgetSettings
from cdc.errors import LogFull

_MEASURE_SECONDS = 5.0
_log = logging.getLogger(__name__)
_MB, _GB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of the state folder. `message` says why nothing may be added; empty: there is space."""

    free_bytes: int
    used_bytes: int
    message: str = ""


class DiskBudget:
    """Checks the disk space of a state folder. The folder is measured only if it has a limit, and not on every call.

    `unlisted` returns the bytes that no listing shows: large transactions in files without a name.
    """

    def __init__(self, state: Path, budgets: BudgetSettings, unlisted: Callable[[], int] = lambda: 0) -> None:
        self._state = state
        self._budgets = budgets
        self._unlisted = unlisted
        self._used, self._measured_at = 0, float("-inf")
        self._lock = threading.Lock()

    def measure(self) -> Disk:
        """Free and used space now."""
        found = os.statvfs(self._state)
        free, used = found.f_bavail * found.f_frsize, self._used_bytes()
        floor, most = self._budgets.free_mb * _MB, self._budgets.state_gb * _GB
        message = ""
        if free < floor:
            message = f"{free // _MB} MB are free under {self._state}, less than budgets.free_mb ({floor / _MB:g})."
        elif most and used > most:
            message = f"{self._state} holds {used / _GB:.2f} GB, more than budgets.state_gb ({most / _GB:g})."
        return Disk(free, used, message)

    def check(self) -> None:
        """Raise LogFull if nothing may be added."""
        if message := self.measure().message:
            raise LogFull(message, "Free disk space, let the slowest sink catch up, or raise the budget.")

    def _used_bytes(self) -> int:
        if not self._budgets.state_gb:
            return 0
        with self._lock:
            if time.monotonic() - self._measured_at > _MEASURE_SECONDS:
                self._used, self._measured_at = folder_bytes(self._state), time.monotonic()
            return self._used + self._unlisted()


def folder_bytes(folder: Path) -> int:
    """The size of a folder, also while other processes write to it."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += Path(parent, name).lstat().st_size
    return size


def resident_bytes(pid: int) -> int:
    """Memory of a process and its descendants: Spark's JVM and workers count for the part that started them."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        return sum(_resident(process) for process in (root, *root.children(recursive=True)))
    return 0


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


class MemoryBudget:
    """Decides when a part must be restarted: over its limit several times in a row, since a single peak may be garbage.

    A part that was restarted and has made no progress since is left alone: its work needs that much memory, a row of
    hundreds of megabytes for instance, and it would restart for ever.
    """

    _TIMES_OVER = 3

    def __init__(self, limits: dict[str, float]) -> None:
        self._limits = limits
        self._over: dict[str, int] = {}
        self._restarted_at: dict[str, object] = {}
        self.excess: dict[str, str] = {}
        """A message for each part that needs more than its limit."""

    def restart_reason(self, part: str, resident: int, progress: object = None) -> str:
        """Why the part must be restarted; empty: it need not. `progress` changes whenever the part advances."""
        limit = self._limits.get(part, 0)
        over = self._over[part] = self._over.get(part, 0) + 1 if limit and resident > limit * _MB else 0
        if not over:
            self.excess.pop(part, None)
        if over < self._TIMES_OVER:
            return ""
        self._over[part] = 0
        reason = f"it uses {resident // _MB} MB, more than budgets.{part}_memory_mb ({limit:g})"
        if progress is not None and self._restarted_at.get(part) == progress:
            self._warn(part, f"{part}: {reason}, and a restart did not help. Raise budgets.{part}_memory_mb.")
            return ""
        self._restarted_at[part] = progress
        return reason

    def _warn(self, part: str, message: str) -> None:
        if part not in self.excess:
            _log.warning("%s", message)
        self.excess[part] = message


def limits_of(budgets: BudgetSettings, parts: Sequence[str]) -> dict[str, float]:
    """Megabytes by part; 0: no limit."""
    return {part: float(getattr(budgets, f"{part}_memory_mb", 0)) for part in parts}

"""What the pipeline may take of the machine: room on disk for its state, memory for its parts.

Over the disk's budget the log takes nothing more: reading stops, the slot keeps the WAL, status says so, and it goes on
by itself once there is room. A part over its memory's budget is started again: everything it holds is in the log.
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

_LOOK_SECONDS = 5.0
_log = logging.getLogger(__name__)
_MB, _GB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk under the state folder. `message` says why nothing may be added; empty: there is room."""

    free_bytes: int
    used_bytes: int
    message: str = ""


class DiskBudget:
    """Judges the room under a state folder. The folder is measured only where it has a limit, and not every time.

    `unlisted` says how many bytes lie there that no listing shows: large transactions in files without a name.
    """

    def __init__(self, state: Path, budgets: BudgetSettings, unlisted: Callable[[], int] = lambda: 0) -> None:
        self._state = state
        self._budgets = budgets
        self._unlisted = unlisted
        self._used, self._looked = 0, float("-inf")
        self._turn = threading.Lock()

    def look(self) -> Disk:
        """How it stands."""
        found = os.statvfs(self._state)
        free, used = found.f_bavail * found.f_frsize, self._measured()
        floor, most = self._budgets.free_mb * _MB, self._budgets.state_gb * _GB
        message = ""
        if free < floor:
            message = f"{free // _MB} MB are free under {self._state}, less than budgets.free_mb ({floor / _MB:g})."
        elif most and used > most:
            message = f"{self._state} holds {used / _GB:.2f} GB, more than budgets.state_gb ({most / _GB:g})."
        return Disk(free, used, message)

    def check(self) -> None:
        """Raise LogFull where nothing may be added."""
        if message := self.look().message:
            raise LogFull(message, "Make room, let the slowest sink catch up, or raise the budget.")

    def _measured(self) -> int:
        if not self._budgets.state_gb:
            return 0
        with self._turn:
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._used, self._looked = folder_bytes(self._state), time.monotonic()
            return self._used + self._unlisted()


def folder_bytes(folder: Path) -> int:
    """What a folder holds, while others write to it."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += Path(place, name).lstat().st_size
    return size


def resident_bytes(pid: int) -> int:
    """Memory of a process and of everything below it: Spark's JVM and workers count for the part that has them."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        return sum(_resident(process) for process in (root, *root.children(recursive=True)))
    return 0


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


class MemoryBudget:
    """Says when a part has been over its limit for several looks in a row: one look may meet a garbage collection.

    A part that was started again for it and has come no further since is left alone: what it works on needs that much,
    a row of hundreds of megabytes for instance, and it would begin again with it for ever.
    """

    _PATIENCE = 3

    def __init__(self, limits: dict[str, float]) -> None:
        self._limits = limits
        self._over: dict[str, int] = {}
        self._stood: dict[str, object] = {}
        self.excess: dict[str, str] = {}
        """Parts that need more than their limit, in words."""

    def judge(self, part: str, resident: int, progress: object = None) -> str:
        """Why the part must be started again; empty: it need not. `progress` differs once it has come further."""
        limit = self._limits.get(part, 0)
        over = self._over[part] = self._over.get(part, 0) + 1 if limit and resident > limit * _MB else 0
        if not over:
            self.excess.pop(part, None)
        if over < self._PATIENCE:
            return ""
        self._over[part] = 0
        reason = f"it holds {resident // _MB} MB, more than budgets.{part}_memory_mb ({limit:g})"
        if progress is not None and self._stood.get(part) == progress:
            self._tell(part, f"{part}: {reason}, and a restart did not help. Raise budgets.{part}_memory_mb.")
            return ""
        self._stood[part] = progress
        return reason

    def _tell(self, part: str, message: str) -> None:
        if part not in self.excess:
            _log.warning("%s", message)
        self.excess[part] = message


def limits_of(budgets: BudgetSettings, parts: Sequence[str]) -> dict[str, float]:
    """Megabytes by part; 0: no limit."""
    return {part: float(getattr(budgets, f"{part}_memory_mb", 0)) for part in parts}

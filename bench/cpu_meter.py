"""CPU and memory of processes, and the machine's load, from /proc."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    return sum(map(int, _stat(pid)[11:13])) / _TICKS


def tree_cpu(root: int) -> float:
    """User and system time of a process and all its descendants, also of those that have ended."""
    total = 0.0
    for pid in tree(root):
        with contextlib.suppress(OSError):
            total += sum(map(int, _stat(pid)[11:15])) / _TICKS
    return total


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for pid in processes():
        with contextlib.suppress(OSError):
            children.setdefault(int(_stat(pid)[1]), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def processes() -> Iterator[int]:
    """All running processes; some may have ended before the caller reads their data."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _stat(pid: int) -> list[str]:
    """The fields after the program's name: 1 parent, 11 and 12 its own time, 13 and 14 that of ended children."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def peak_rss_mb(pid: int) -> float:
    """The peak resident memory of a process."""
    return round(_status_mb(pid, "VmHWM"), 1)


def rss_mb(pid: int) -> float:
    """Resident memory of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return _status_mb(pid, "VmRSS")
    return 0.0


def _status_mb(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), 0.0)


def busy_seconds() -> float:
    """CPU seconds of the whole machine that were neither idle nor waiting for a disk."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


def load() -> float:
    """The load average of the last minute: it shows other work on the machine."""
    return round(os.getloadavg()[0], 2)


def wait(condition: Callable[[], object], what: str, seconds: float = 300.0, every: float = 0.05) -> None:
    """Wait until the condition is true. Raises TimeoutError, which names `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(every)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(seconds)
    places = (("p50", 0.5), ("p99", 0.99))
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * at))] * 1000, 1) for name, at in places}

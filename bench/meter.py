"""What a process costs: CPU, memory and the machine's load, from /proc."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def peak_rss_mb(pid: int) -> float:
    """The most memory that a process ever held."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def busy_seconds() -> float:
    """CPU seconds that the whole machine has worked: what is neither idle nor waiting for a disk."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


def load() -> float:
    """Runnable tasks over the last minute: what else the machine was doing."""
    return round(os.getloadavg()[0], 2)


def wait(condition: Callable[[], object], what: str, seconds: float = 300.0, every: float = 0.05) -> None:
    """Until the condition holds. Raises TimeoutError naming what was waited for."""
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

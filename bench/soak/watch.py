"""What a soak looks at: memory, files, the slot, and processes that should be gone."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psycopg

from bench.cpu_meter import processes, rss_mb, tree

MARK = "MILLRACE_SOAK"
"""In the environment of the daemon, and so of everything that it starts: none of it can hide."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One quiet moment. Memory is of all processes of a part, the JVM included."""

    seconds: float
    daemon_mb: float
    capture_mb: float
    apply_mb: float
    open_files: int
    state_files: int
    state_mb: float
    slot_mb: float


def sample(seconds: float, pids: Mapping[str, int], state: Path, slot_bytes: int) -> Sample:
    """Measure now."""
    trees = {name: tree(pid) if name != "daemon" else [pid] for name, pid in pids.items()}
    sizes = {name: round(sum(map(rss_mb, found)), 1) for name, found in trees.items()}
    files, size = contents(state)
    opened = sum(open_files(pid) for found in trees.values() for pid in found)
    return Sample(
        round(seconds, 1),
        sizes.get("daemon", 0.0),
        sizes.get("capture", 0.0),
        sizes.get("apply", 0.0),
        opened,
        files,
        round(size / 2**20, 2),
        round(slot_bytes / 2**20, 2),
    )


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Of each measure: the median of the second fifth of the run (the first warms up), of the last fifth, the most."""
    if not samples:
        return {}
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples[:1], samples[-fifth:]
    names = [name for name in asdict(samples[0]) if name != "seconds"]
    return {
        name: {
            "early": median(getattr(one, name) for one in early),
            "late": median(getattr(one, name) for one in late),
            "most": max(getattr(one, name) for one in samples),
        }
        for name in names
    }


def open_files(pid: int) -> int:
    """Descriptors of a process; 0 if it is gone."""
    with suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return 0


def marked(value: str) -> list[int]:
    """Live processes whose environment carries the mark."""
    wanted = f"{MARK}={value}".encode()
    found = []
    for pid in processes():
        with suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def contents(folder: Path) -> tuple[int, int]:
    """Files and bytes below a folder that somebody writes to."""
    files = size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += Path(place, name).stat().st_size
                files += 1
    return files, size


def retained_bytes(connection: psycopg.Connection, slot: str) -> int:
    """WAL that the slot holds back."""
    row = connection.execute(
        "select pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) from pg_replication_slots where slot_name = %s",
        (slot,),
    ).fetchone()
    return int(row[0]) if row and row[0] is not None else 0

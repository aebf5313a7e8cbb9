"""What a soak test measures: memory, files, the slot, and processes that should have ended."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psycopg

from bench.cpu_meter import processes, rss_mb, tree

MARK = "MILLRACE_SOAK"
"""An environment variable of the daemon and so of every process that it starts: it finds all of them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample. Memory is that of all processes of capture or apply, including the JVM."""

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


_FEWEST = 10
"""Samples from which growth is judged: a run with fewer is all warm-up."""


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """For each measure: the median of the second fifth of the run (the first is warm-up), of the last fifth, the
    maximum. Nothing for a run with few samples.
    """
    if len(samples) < _FEWEST:
        return {}
    fifth = len(samples) // 5
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
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
    """Running processes whose environment has the mark."""
    wanted = f"{MARK}={value}".encode()
    found = []
    for pid in processes():
        with suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def contents(folder: Path) -> tuple[int, int]:
    """Number of files and bytes below a folder, while other processes write there."""
    files = size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += Path(path, name).stat().st_size
                files += 1
    return files, size


def retained_bytes(connection: psycopg.Connection, slot: str) -> int:
    """Bytes of WAL that the slot retains."""
    row = connection.execute(
        "select pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) from pg_replication_slots where slot_name = %s",
        (slot,),
    ).fetchone()
    return int(row[0]) if row and row[0] is not None else 0

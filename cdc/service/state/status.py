"""What each part of the daemon says of itself: one small JSON file a part, replaced whole.

Promise: a reader sees the old facts or the new ones, never half of each. The trap: a file outlives its process, so its
age (`at`) is part of what it says, and whoever shows it must look at that first.
"""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from cdc.durable_files import replace_unsynced

Facts = Mapping[str, object]


def folder(state: Path) -> Path:
    """Where the status files lie."""
    return state / "status"


def publish(state: Path, part: str, facts: Facts) -> None:
    """Replace what a part says, stamped with the time and the process. Raises OSError and leaves nothing aside."""
    place = folder(state)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    stamped = {**facts, "part": part, "pid": os.getpid(), "at": datetime.now(UTC).isoformat()}
    replace_unsynced(place / f"{part}.json", json.dumps(stamped, ensure_ascii=False, default=str).encode())


def read(state: Path, part: str) -> dict[str, object]:
    """What a part last said; empty if it never did."""
    try:
        facts = json.loads((folder(state) / f"{part}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return facts if isinstance(facts, dict) else {}


def gone(facts: Facts) -> bool:
    """Whether the process that said this has ended: what it said of the present may be over."""
    pid = facts.get("pid")
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # it runs, for another user
    return False


def age(facts: Facts, now: datetime) -> float:
    """Seconds since the part spoke; infinite if it never did."""
    try:
        return (now - datetime.fromisoformat(str(facts["at"]))).total_seconds()
    except (KeyError, ValueError):
        return float("inf")

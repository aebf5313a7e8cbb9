"""The status that each part of the daemon reports: one small JSON file per part, replaced whole.

Promise: a reader sees the old facts or the new ones, never half of each. The trap: a file outlives its process, so
check its age (`at`) before you use its facts.
"""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from cdc.durable_files import replace_unsynced
from cdc.service.standby.lease import here

Facts = Mapping[str, object]
SILENT_AFTER = 15.0  # seconds; parts report about once a second, and a long garbage collection takes less than this


def folder(state: Path) -> Path:
    """The folder of the status files."""
    return state / "status"


def publish(state: Path, part: str, facts: Facts) -> None:
    """Replace a part's status file, stamped with time and pid. If it raises OSError, no temporary file is left."""
    target = folder(state)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    process = {"part": part, "pid": os.getpid(), "place": here().place}
    stamped = {**facts, **process, "at": datetime.now(UTC).isoformat()}
    replace_unsynced(target / f"{part}.json", json.dumps(stamped, ensure_ascii=False, default=str).encode())


def read(state: Path, part: str) -> dict[str, object]:
    """What a part last reported; empty if it never did."""
    try:
        facts = json.loads((folder(state) / f"{part}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return facts if isinstance(facts, dict) else {}


def gone(facts: Facts) -> bool:
    """Whether the process that reported this has ended: its facts may be out of date. One on another machine counts
    as ended when it has been silent for a while."""
    pid = facts.get("pid")
    if not isinstance(pid, int):
        return False
    if facts.get("place", here().place) != here().place:
        return age(facts, datetime.now(UTC)) > SILENT_AFTER
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # it runs, as another user
    return False


def age(facts: Facts, now: datetime) -> float:
    """Seconds since the part reported; infinite if it never did."""
    try:
        return (now - datetime.fromisoformat(str(facts["at"]))).total_seconds()
    except (KeyError, ValueError):
        return float("inf")

"""The result of a soak test: faults with their recovery times, and measures that grew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LIMITS = {
    "daemon_mb": 1.3,
    "capture_mb": 1.3,
    "apply_mb": 1.3,
    "open_files": 1.3,
    "state_files": 1.5,
    "state_mb": 1.5,
}
"""Late over early. Heaps vary by 10 to 20 %; a leak over a long run is far more than a third."""
_SLACK = {"daemon_mb": 20, "capture_mb": 40, "apply_mb": 150, "open_files": 60, "state_files": 600, "state_mb": 40}
"""Growth below this does not count: a short run ends before its log has been merged once."""
_SLOT_MB = 64.0


@dataclass(slots=True)
class Fault:
    """One injected fault, and the seconds until every sink had caught up (-1: not waited for)."""

    kind: str
    at: float
    recovery_seconds: float = -1.0
    exit_code: int | None = None

    @property
    def wrong(self) -> bool:
        """A daemon that was asked to stop must end with 0."""
        return self.kind == "stop daemon" and self.exit_code != 0


def summary(faults: Sequence[Fault]) -> dict[str, dict[str, float]]:
    """By kind: how many, and the recovery times that were waited for."""
    table: dict[str, dict[str, float]] = {}
    for kind in sorted({fault.kind for fault in faults}):
        mine = [fault for fault in faults if fault.kind == kind]
        times = sorted(fault.recovery_seconds for fault in mine if fault.recovery_seconds >= 0)
        table[kind] = {"count": len(mine)}
        if times:
            table[kind] |= {"median_seconds": times[len(times) // 2], "worst_seconds": times[-1]}
    return table


def growths(grown: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A sentence for each measure that grew beyond its limit."""
    found = []
    for name, limit in _LIMITS.items():
        seen = grown.get(name)
        if seen and seen["late"] > seen["early"] * limit and seen["late"] - seen["early"] > _SLACK[name]:
            found.append(f"{name} grew from {seen['early']:g} to {seen['late']:g}")
    slot = grown.get("slot_mb")
    if slot and slot["late"] > _SLOT_MB:
        found.append(f"the slot holds back {slot['late']:g} MB")
    return found

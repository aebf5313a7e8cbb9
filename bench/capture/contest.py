"""Several contenders at the same work: who takes part, how they compare, and where the results go."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Contest:
    """`limit` is the contender that does the least that must be done; `unit` is what is counted: a row, a change.

    `variants` are measured only where CONTENDERS names them.
    """

    name: str
    contenders: tuple[str, ...]
    limit: str
    unit: str
    variants: tuple[str, ...] = ()

    def hold(self, run: Callable[[Sequence[str]], Mapping[str, Any]]) -> None:
        """Measure and print the ratios; write the results, those of a selection only where OUT says.

        `run` is told who takes part (CONTENDERS) and gives `workload` and `contenders`.
        """
        chosen = self.chosen(os.environ.get("CONTENDERS", ""))
        found = run(chosen)
        results = {
            "workload": found["workload"],
            "machine": machine(),
            "contenders": found["contenders"],
            "ratios": self.ratios(found["contenders"]),
        }
        print(json.dumps(results["ratios"], indent=1))
        if out := os.environ.get("OUT"):
            write(Path(out), results)
        elif set(self.contenders) <= set(chosen):
            write(RESULTS / f"{self.name}.json", results)

    def chosen(self, named: str) -> list[str]:
        """From names with commas between them; empty: all but the variants."""
        wanted = [name.strip() for name in named.split(",") if name.strip()]
        every = (*self.contenders, *self.variants)
        if strangers := [name for name in wanted if name not in every]:
            raise SystemExit(f"CONTENDERS: {strangers[0]!r} is none of {', '.join(every)}")
        return [name for name in every if name in wanted] or list(self.contenders)

    def ratios(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """Rate as a part of the limit's, and how many times as fast, cheap and small as Debezium."""
        rate, cpu, memory = f"{self.unit}s_per_s", f"cpu_us_per_{self.unit}", "peak_rss_mb"
        said: dict[str, dict[str, float]] = {name: {} for name in found}
        for name, each in found.items():
            if limit := found.get(self.limit):
                said[name][f"rate_of_{self.limit}"] = round(each[rate] / limit[rate], 2)
            if rival := found.get("debezium_kafka"):
                said[name]["speed_of_debezium"] = round(each[rate] / rival[rate], 2)
                said[name]["debezium_cpu"] = round(rival[cpu] / max(each[cpu], 0.01), 2)
                said[name]["debezium_memory"] = round(rival[memory] / each[memory], 2)
        return said


def machine() -> dict[str, object]:
    """Where and when."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"cpus": os.cpu_count(), "python": platform.python_version(), "at": at}


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Into a file, its folder made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

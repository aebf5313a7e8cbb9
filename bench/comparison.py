"""A comparison of several contenders on the same work: selection, ratios, and the file of results."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`limit` is the contender that does the least possible work; `unit` is what is counted: a row, a change.

    `variants` are measured only if CONTENDERS names them.
    """

    name: str
    contenders: tuple[str, ...]
    limit: str
    unit: str
    variants: tuple[str, ...] = ()

    def run(self, measure: Callable[[Sequence[str]], Mapping[str, Any]]) -> None:
        """Measure and print the ratios; write the results, those of a selection of contenders only to OUT.

        `measure` gets the chosen contenders (CONTENDERS) and returns `workload` and `contenders`.
        """
        chosen = self.chosen(os.environ.get("CONTENDERS", ""))
        found = measure(chosen)
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
        """The contenders named in a list separated by commas; empty: all but the variants."""
        wanted = [name.strip() for name in named.split(",") if name.strip()]
        every = (*self.contenders, *self.variants)
        if unknown := [name for name in wanted if name not in every]:
            raise SystemExit(f"CONTENDERS: {unknown[0]!r} is none of {', '.join(every)}")
        return [name for name in every if name in wanted] or list(self.contenders)

    def ratios(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """The rate relative to the limit's, and speed, CPU and memory relative to Debezium's."""
        rate, cpu, memory = f"{self.unit}s_per_s", f"cpu_us_per_{self.unit}", "peak_rss_mb"
        ratios: dict[str, dict[str, float]] = {name: {} for name in found}
        for name, each in found.items():
            if limit := found.get(self.limit):
                ratios[name][f"rate_of_{self.limit}"] = round(each[rate] / limit[rate], 2)
            if debezium := found.get("debezium_kafka"):
                ratios[name]["speed_of_debezium"] = round(each[rate] / debezium[rate], 2)
                ratios[name]["debezium_cpu"] = round(debezium[cpu] / max(each[cpu], 0.01), 2)
                ratios[name]["debezium_memory"] = round(debezium[memory] / each[memory], 2)
        return ratios


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure of several runs, at any depth; what is no number is that of the last run."""
    found: dict[str, Any] = {}
    for name, last in runs[-1].items():
        values = [run[name] for run in runs]
        if isinstance(last, dict):
            found[name] = medians(values)
        else:
            found[name] = statistics.median(values) if isinstance(last, int | float) else last
    return found


def machine() -> dict[str, object]:
    """The machine, the Python version and the time."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"cpus": os.cpu_count(), "python": platform.python_version(), "at": at}


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write results to a file; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

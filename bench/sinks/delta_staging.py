"""What the driver pays when tasks write a Delta table: a plan and a commit, for a table of many files.

    python -m bench.sinks.delta_staging        (FILES, CHANGES)

The table's log names FILES files of 10,000 rows each that do not exist: the driver opens none. CHANGES replaced rows at
random places are committed, as eight tasks would stage them. Results: bench/results/delta_staging.json.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bench.comparison import RESULTS, machine, write
from bench.sinks.batches import TABLE
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.files.transaction_log import Action, commit
from sinks.delta.schema.layout import DELETED, VERSION
from sinks.delta.settings import DeltaSettings
from sinks.delta.staging.plan import StagingPlan
from sinks.delta.staging.stage import StagedFiles

_ROWS, _TASKS, _RUNS = 10_000, 8, 5


def measure(files: int, changes: int, home: Path) -> dict[str, Any]:
    """CPU of the first plan of a process, and of later plans and commits."""
    sink = delta.open_sink(DeltaSettings(path=str(home / "lake"), maintain_minutes=0), SinkContext(home))
    sink.prepare(TABLE)
    sink.plan(TABLE)
    store = sink.store(TABLE.table)
    assert store.vectors is not None
    adds = [{"add": _add(f"part-{number:06}.parquet", number)} for number in range(files)]
    commit(store.vectors.live.storage, store.current().version() + 1, "WRITE", adds, {})
    first = _cpu(lambda: sink.plan(TABLE))
    plans, commits, size = [], [], 0
    for run in range(_RUNS):
        plans.append(_cpu(lambda: sink.plan(TABLE)))
        plan = sink.plan(TABLE)
        size = len(plan)
        staged = _staged(StagingPlan.decoded(plan).version, files, changes, run)
        commits.append(_cpu(lambda: sink.commit_staged(TABLE, plan, staged)))  # noqa: B023 - called at once
    return {
        "files": files,
        "changes": changes,
        "first_plan_cpu_ms": round(first * 1000, 1),
        "plan_cpu_ms": round(statistics.median(plans) * 1000, 1),
        "plan_bytes": size,
        "commit_cpu_ms": round(statistics.median(commits) * 1000, 1),
        "driver_cpu_us_per_change": round((statistics.median(plans) + statistics.median(commits)) / changes * 1e6, 2),
    }


def _staged(version: int, files: int, changes: int, run: int) -> list[bytes]:
    """Each run replaces other rows."""
    random = np.random.default_rng(run)
    row = random.integers(run * _ROWS // _RUNS, (run + 1) * _ROWS // _RUNS, changes, np.int64)
    places = np.unique((random.integers(0, files, changes).astype(np.uint64) << np.uint64(32)) | row.astype(np.uint64))
    return [
        StagedFiles(version, 2000 + run, [_add(f"new-{run}-{task}.parquet", task)], part, [], []).encoded()
        for task, part in enumerate(places[task::_TASKS] for task in range(_TASKS))
    ]


def _add(path: str, number: int) -> Action:
    low, high = {"id": number * _ROWS, VERSION: 100, DELETED: False}, {VERSION: 100, DELETED: False}
    stats = {"numRecords": _ROWS, "minValues": low, "maxValues": {**high, "id": (number + 1) * _ROWS - 1}}
    stats["nullCount"] = dict.fromkeys(low, 0)
    now = int(time.time() * 1000)
    rest = {"partitionValues": {}, "modificationTime": now, "dataChange": True, "stats": orjson.dumps(stats).decode()}
    return {"path": path, "size": 400_000, **rest}


def _cpu(action: Callable[[], object]) -> float:
    begun = time.process_time()
    action()
    return time.process_time() - begun


def main() -> None:
    """Measure and write the results."""
    files, changes = (int(os.environ.get(name, default)) for name, default in (("FILES", 10_000), ("CHANGES", 100_000)))
    found = []
    for few in (files, files // 100):
        with tempfile.TemporaryDirectory(prefix="millrace-staging-") as home:
            found.append(measure(few, changes, Path(home)))
            print(found[-1], flush=True)
    write(RESULTS / "delta_staging.json", {"machine": machine(), "tables": found})


if __name__ == "__main__":
    main()

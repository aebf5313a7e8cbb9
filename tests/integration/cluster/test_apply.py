"""The apply process on a cluster: tasks on the executors read the log, fold and write to the stores."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from cdc.service.state import status
from tests.fix_cluster import SparkCluster
from tests.fix_log import FilledLog
from tests.fix_processes import Program, RunProgram, wait_until
from tests.scenes.histories import change, labelled, table

pytestmark = pytest.mark.spark
ITEMS = table()
Start = Callable[..., Program]


@pytest.fixture
def start(run_program: RunProgram, spark_cluster: SparkCluster, state_dir: Path, tmp_path: Path) -> Start:
    """Starts the process with these sinks on the cluster."""

    def run(*sinks: dict[str, Any], **conf: str) -> Program:
        config = tmp_path / "millrace.yaml"
        config.touch(mode=0o600)
        spark = {**spark_cluster.settings, "memory": "600m"}
        spark["conf"] = {**spark["conf"], "spark.default.parallelism": "4", **conf}
        config.write_text(yaml.safe_dump({"state": str(state_dir), "sinks": list(sinks), "spark": spark}))
        return run_program("-m", "cdc.service.apply.process", "--config", str(config))

    return run


def facts(state: Path, sink: str) -> dict[str, Any]:
    found: Any = status.read(state, "apply").get("sinks") or {}
    return dict(found.get(sink, {}))


def test_tasks_write_rows_truncates_and_partial_rows_and_a_killed_worker_costs_nothing(
    start: Start, spark_cluster: SparkCluster, filled_log: FilledLog, redis_url: str, state_dir: Path
) -> None:
    filled_log.record(ITEMS)
    end = filled_log.append(labelled(5_000, 10, "first"))
    program = start({"kind": "redis", "url": redis_url})
    client = redis.Redis.from_url(redis_url)

    def reached(end: int) -> Callable[[], bool]:
        def check() -> bool:
            assert program.running(), program.said()[-4000:]
            return [item.reached for item in filled_log.reader.consumers()] == [end]

        return check

    def label(key: int) -> Any:
        return json.loads(client.get(f"public.items:{key}") or b"{}").get("label")

    wait_until(reached(end), 180, "the first batch")
    assert (label(0), label(4_999), label(5_000)) == ("first", "first", None)
    partial = change("u", '{"id":9000}', 20, '{"id":9000,"label":"no stored row"}', ["big"])
    end = filled_log.append([*labelled(3_000, 19, "second"), partial])
    wait_until(reached(end), 60, "the second batch")
    assert (label(0), label(2_999), label(4_999)) == ("second", "second", "first")
    wait_until(lambda: facts(state_dir, "redis")["dead_letters"] == 1, 10, "the dead letter")

    spark_cluster.workers[0].kill()
    end = filled_log.append([change("t", None, 30), *labelled(4_000, 40, "third")])
    wait_until(reached(end), 120, "the batch after a worker was killed")
    assert (label(0), label(3_999), label(4_999)) == ("third", "third", None)
    wait_until(lambda: facts(state_dir, "redis")["dead_letters"] == 0, 10, "the dead letter's end")
    assert program.terminate() == 0

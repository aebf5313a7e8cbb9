"""The apply process on a cluster: tasks on the executors read the log, fold and write to the stores."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

import cdc.log
from cdc.config.settings import Settings
from cdc.service.state import status
from tests.fix_cluster import SparkCluster
from tests.fix_log import FilledLog
from tests.fix_processes import Program, RunProgram, wait_until
from tests.fix_s3 import S3Server
from tests.scenes.histories import change, labelled, table

pytestmark = pytest.mark.spark
ITEMS = table()
Start = Callable[..., Program]


@pytest.fixture
def start(run_program: RunProgram, spark_cluster: SparkCluster, state_dir: Path, tmp_path: Path) -> Start:
    """Starts the process with these sinks on the cluster."""

    def run(*sinks: dict[str, Any], log: Mapping[str, object] | None = None, **conf: str) -> Program:
        config = tmp_path / "millrace.yaml"
        config.touch(mode=0o600)
        spark = {**spark_cluster.settings, "memory": "600m"}
        spark["conf"] = {**spark["conf"], "spark.default.parallelism": "4", **conf}
        facts = {"state": str(state_dir), "sinks": list(sinks), "spark": spark, "log": dict(log or {})}
        config.write_text(yaml.safe_dump(facts))
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


def test_tasks_read_a_log_in_a_bucket(
    start: Start,
    settings_of: Callable[..., Settings],
    s3_server: S3Server,
    s3_url: str,
    redis_url: str,
    state_dir: Path,
) -> None:
    log = {"kind": "segments", "uri": s3_url, "storage_options": s3_server.storage_options}
    settings = settings_of(log=log, spark={"master": "spark://127.0.0.1:1"})
    with closing(cdc.log.open_writer(settings)) as writer:
        filled = FilledLog(settings, writer)
        filled.record(ITEMS)
        ends = [filled.append(labelled(20_000, 10, "first"))]
        program = start({"kind": "redis", "url": redis_url}, log=log)
        client = redis.Redis.from_url(redis_url)

        def reached() -> bool:
            assert program.running(), program.said()[-4000:]
            return [item.reached for item in filled.reader.consumers()] == ends[-1:]

        wait_until(reached, 180, "the first batch")
        ends.append(filled.append(labelled(3_000, 20, "second")))
        wait_until(reached, 60, "the second batch")
        labels = [json.loads(client.get(f"public.items:{key}") or b"{}").get("label") for key in (0, 2_999, 19_999)]
        assert labels == ["second", "second", "first"]
        assert program.terminate() == 0
    assert sorted(path.name for path in (state_dir / "log").iterdir()) == ["lock"]
    assert s3_server.storage_options["aws_secret_access_key"] not in program.said()

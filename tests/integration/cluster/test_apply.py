"""The apply process on a cluster: tasks on the executors read the log, fold and write to the stores."""

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
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
from tests.fix_processes import Program, RunProgram, is_stopped, wait_until
from tests.fix_s3 import S3Server
from tests.scenes.histories import change, labelled, table

pytestmark = pytest.mark.spark
ITEMS = table()
Start = Callable[..., Program]
TWICE = {
    "spark.executorEnv.MILLRACE_FAIL": "task.before_apply:stop@3,task.after_apply:stop@3",
    "spark.network.timeout": "12s",
    "spark.network.timeoutInterval": "2s",
    "spark.executor.heartbeatInterval": "2s",
    "spark.speculation": "true",
    "spark.speculation.interval": "10ms",
    "spark.speculation.minTaskRuntime": "10ms",
    "spark.speculation.multiplier": "1.05",
    "spark.speculation.quantile": "0.25",
}
"""Slow tasks run twice at once. Each Python process stops before it writes its third share, and after it."""


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


def test_tasks_shape_their_rows(start: Start, filled_log: FilledLog, redis_url: str) -> None:
    """Programs are compiled in the tasks; an expression that fails there makes a dead letter of the driver."""
    filled_log.record(ITEMS)
    compute = {"title": "label || '!'", "share": "100 / (id - 7)"}
    shape = {"where": "label <> 'second'", "rename": {"id": "number"}, "compute": compute, "target": "item"}
    end = filled_log.append(labelled(5_000, 10, "first"))
    program = start({"kind": "redis", "url": redis_url, "shape": {"public.items": shape}})
    client = redis.Redis.from_url(redis_url)

    def reached() -> bool:
        assert program.running(), program.said()[-4000:]
        return [item.reached for item in filled_log.reader.consumers()] == [end]

    def row(key: int) -> Any:
        return json.loads(client.get(f"item:{key}") or b"{}")

    wait_until(reached, 180, "the first batch")
    assert (row(9)["number"], row(9)["title"], row(9)["share"], row(7)) == (9, "first!", 50, {})
    assert "division by zero" not in program.said() and "refused 1 change(s)" in program.said()
    end = filled_log.append(labelled(3_000, 20, "second"))
    wait_until(reached, 60, "the second batch")
    assert (row(9), row(2_999), row(3_000)["title"]) == ({}, {}, "first!")
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


class FrozenWorker:
    """Freezes the first worker of the cluster, with its executor, when a task has stopped there before it writes. Other
    tasks that stop go on at once."""

    def __init__(self, cluster: SparkCluster) -> None:
        self._cluster = cluster
        self.tasks: list[int] = []
        self._frozen: list[int] = []

    def look(self) -> None:
        """Freeze it, or let stopped tasks go on."""
        for number, worker in enumerate(self._cluster.workers):
            found = self._cluster.executors(number)
            tasks = [pid for pid in found if is_stopped(pid) and pid not in self._frozen]
            if tasks and not self.tasks and number == 0:
                self.tasks, self._frozen = tasks, [worker.pid, *found]
                self._signal(self._frozen, signal.SIGSTOP)
            else:
                self._signal(tasks, signal.SIGCONT)

    def write_late(self) -> None:
        """Let the tasks write, and then everything go on."""
        self._signal(self.tasks, signal.SIGCONT)
        wait_until(lambda: all(map(is_stopped, self.tasks)), 30, "the late tasks to have written")
        self._signal(self._frozen, signal.SIGCONT)

    def _signal(self, pids: Sequence[int], sent: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, sent)


def test_tasks_that_run_twice_or_wake_up_late_bring_no_key_back_to_an_older_state(
    start: Start, spark_cluster: SparkCluster, filled_log: FilledLog, redis_url: str
) -> None:
    """A worker freezes while a task is about to write. Its executor is given up, and the task goes on when later
    batches have been applied."""
    filled_log.record(ITEMS)
    client, keys, rounds = redis.Redis.from_url(redis_url), 4_000, 30
    watched = [f"public.items:{key}" for key in range(0, keys, 10)]
    seen = [0] * len(watched)
    frozen = FrozenWorker(spark_cluster)

    def look() -> None:
        labels = [int(json.loads(row)["label"]) if isinstance(row, bytes) else 0 for row in client.mget(watched)]
        assert all(now >= before for now, before in zip(labels, seen, strict=True))
        seen[:] = labels

    def reached(end: int) -> bool:
        assert program.running(), program.said()[-4000:]
        look()
        frozen.look()
        return [item.reached for item in filled_log.reader.consumers()] == [end]

    end = filled_log.append(labelled(keys, 10, "1"))
    program = start({"kind": "redis", "url": redis_url}, **TWICE)
    wait_until(partial(reached, end), 180, "the first batch")
    for number in range(2, rounds + 1):
        end = filled_log.append(labelled(keys, 10 * number, str(number)))
        if number % 3 == 0:
            wait_until(partial(reached, end), 120, f"the changes to {number}")
    assert frozen.tasks
    frozen.write_late()
    look()
    assert seen == [rounds] * len(watched)
    assert program.terminate() == 0

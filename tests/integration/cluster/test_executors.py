"""Executors of a cluster do this product's work where it is not installed: code, jars and settings are shipped."""

import json
from pathlib import Path
from typing import Any

import pytest

from sinks.spark.worker_python import worker_python
from tests.fix_cluster import SparkCluster
from tests.fix_log import FilledLog
from tests.fix_processes import RunProgram
from tests.scenes.histories import change, table

pytestmark = pytest.mark.spark
ITEMS = 40


def elsewhere(cluster: SparkCluster, python: Path) -> dict[str, Any]:
    """The cluster by a name that a session takes for that of another machine. The driver stays on loopback. Its Python
    connects to Spark in time also while the machine is busy."""
    here = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.cores.max": "2",
        "spark.pyspark.python": str(python),
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    master = cluster.settings["master"].replace("127.0.0.1", "LOCALHOST")
    return {**cluster.settings, "master": master, "conf": {**cluster.settings["conf"], **here}}


def test_executors_use_shipped_packages_and_jars_read_the_log_and_are_examined(
    spark_cluster: SparkCluster, filled_log: FilledLog, run_program: RunProgram, tmp_path: Path
) -> None:
    filled_log.record(table())
    for number in range(ITEMS):
        filled_log.append([change("c", f'{{"id":{number}}}', 100 + number, f'{{"id":{number}}}')])
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.touch(mode=0o600)
    log = {"log": str(filled_log.settings.state / "log"), "start": filled_log.reader.start()}
    (tmp_path / "bin").mkdir()
    settings = elsewhere(spark_cluster, worker_python(tmp_path / "bin"))
    request.write_text(json.dumps({"spark": settings, "scratch": str(tmp_path / "scratch"), **log}))

    driver = run_program("-m", "tests.integration.cluster.driver", str(request), str(answer))
    assert driver.wait(120) == 0, driver.said()[-4000:]
    found = json.loads(answer.read_text())

    works = [worker.data / "work" for worker in spark_cluster.workers]
    assert all(any(Path(row["cwd"]).is_relative_to(work) for work in works) for row in found["imported"])
    assert {row["module"] for row in found["imported"]} == {"./millrace.zip/sinks/fold/arrow.pyc"}
    assert {row["script"] for row in found["imported"]} == {"./millrace.zip/sinks/redis/script.pyc"}
    keys = [key for key in found["keys"] if key is not None]
    assert sorted(json.loads(key)["id"] for key in keys) == list(range(ITEMS))
    assert found["parquet"] == list(range(20))
    verdicts = {(finding["check"], finding["object"]): finding["verdict"] for finding in found["doctor"]}
    assert verdicts["spark.executors", settings["master"]] == "ok"
    assert verdicts["spark.shared_folder", str(filled_log.settings.state)] == "ok"
    assert verdicts["spark.shared_folder", str(tmp_path / "scratch")] == "ok"
    assert verdicts["spark.shared_folder", "/proc/self/cwd"] == "fail"
    assert "spark.python" not in {check for check, _ in verdicts}
    assert not any(entry.endswith("millrace.zip") for entry in found["own path"])

"""Executors of a cluster do this product's work where it is not installed: code, jars and settings are shipped."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fix_cluster import SparkCluster
from tests.fix_log import FilledLog
from tests.fix_processes import RunProgram
from tests.scenes.histories import change, table

pytestmark = pytest.mark.spark
ITEMS = 40


def elsewhere(cluster: SparkCluster) -> dict[str, Any]:
    """The cluster by a name that a session takes for that of another machine. The driver stays on loopback."""
    here = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    master = cluster.settings["master"].replace("127.0.0.1", "LOCALHOST")
    return {**cluster.settings, "master": master, "conf": {**cluster.settings["conf"], **here}}


def test_executors_import_the_shipped_packages_and_read_the_log_and_delta(
    spark_cluster: SparkCluster, filled_log: FilledLog, run_program: RunProgram, tmp_path: Path
) -> None:
    filled_log.record(table())
    for number in range(ITEMS):
        filled_log.append([change("c", f'{{"id":{number}}}', 100 + number, f'{{"id":{number}}}')])
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.touch(mode=0o600)
    log = {"log": str(filled_log.settings.state / "log"), "start": filled_log.reader.start()}
    request.write_text(json.dumps({"spark": elsewhere(spark_cluster), "scratch": str(tmp_path / "scratch"), **log}))

    driver = run_program("-m", "tests.integration.cluster.driver", str(request), str(answer))
    assert driver.wait(120) == 0, driver.said()[-4000:]
    found = json.loads(answer.read_text())

    folders = {row["cwd"] for row in found["imported"]}
    works = {str(worker.data / "work") for worker in spark_cluster.workers}
    assert {next(work for work in works if folder.startswith(work)) for folder in folders} == works
    assert {row["module"] for row in found["imported"]} == {"./millrace.zip/sinks/fold/arrow.pyc"}
    assert {row["script"] for row in found["imported"]} == {"./millrace.zip/sinks/redis/script.pyc"}
    keys = [key for key in found["keys"] if key is not None]
    assert sorted(json.loads(key)["id"] for key in keys) == list(range(ITEMS))
    assert found["delta"] == list(range(0, 20, 2))
    assert not any(entry.endswith("millrace.zip") for entry in found["own path"])

"""A pipeline on a cluster: Spark tasks on two workers, a log on three Kafka brokers, Delta tables in S3."""

import os
import signal
from typing import Any

import pytest
import yaml

from tests.e2e.test_pipeline import customers_at_work
from tests.fix_cluster import KafkaCluster, SparkCluster
from tests.fix_pipeline import Pipeline
from tests.fix_processes import RunProgram, wait_until
from tests.fix_s3 import S3Server
from tests.fix_servers import unique

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(2400)]
_PATIENCE = 600.0
"""Seconds until the stores are level: a master that comes back waits a minute for executors of the dead driver."""


@pytest.fixture
def spread_pipeline(
    pipeline: Pipeline, spark_cluster: SparkCluster, kafka_cluster: KafkaCluster, s3_server: S3Server, s3_url: str
) -> Pipeline:
    """The shop's pipeline on the cluster; not started yet."""
    sections: dict[str, Any] = yaml.safe_load(pipeline.config.read_text(encoding="utf-8"))
    sections["log"] = {
        "kind": "kafka",
        "bootstrap": kafka_cluster.bootstrap,
        "prefix": unique("shop"),
        "partitions": 3,
        "replication": 3,
        "min_insync": 2,
    }
    sections["spark"] = {**spark_cluster.settings, "memory": "600m"}
    sections["spark"]["conf"] = {**spark_cluster.settings["conf"], "spark.default.parallelism": "3"}
    delta = next(sink for sink in sections["sinks"] if sink["kind"] == "delta")
    delta |= {"path": s3_url, "storage_options": s3_server.storage_options}
    pipeline.config.chmod(0o600)
    pipeline.config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    pipeline.reopen()
    return pipeline


def test_doctor_prints_what_it_finds_on_a_cluster_and_nothing_of_sparks_own_log(
    spread_pipeline: Pipeline, run_program: RunProgram
) -> None:
    doctor = run_program("-m", "cdc.cli.main", "doctor", "--config", str(spread_pipeline.config))
    assert doctor.wait(180) == 0, doctor.said()
    assert "executor(s) ran a task" in doctor.said()
    assert "WARN " not in doctor.said()


def test_worker_broker_s3_server_driver_and_master_are_killed_in_turn_and_the_stores_end_equal(
    spread_pipeline: Pipeline, spark_cluster: SparkCluster, kafka_cluster: KafkaCluster, s3_server: S3Server
) -> None:
    daemon = spread_pipeline.start()
    spread_pipeline.settle(_PATIENCE)
    with customers_at_work(spread_pipeline):
        spark_cluster.workers[0].kill()
        spread_pipeline.settle(_PATIENCE)
        spark_cluster.scale(2)
        kafka_cluster.brokers[1].kill()
        s3_server.kill()
        s3_server.start()
        spread_pipeline.settle(_PATIENCE)
        kafka_cluster.start()
        spark_cluster.master.kill()
        before = spread_pipeline.part("apply")
        os.kill(before, signal.SIGKILL)
        spark_cluster.scale(2)
        wait_until(lambda: spread_pipeline.part("apply") != before, _PATIENCE, "another driver")
        spread_pipeline.settle(_PATIENCE)
    spread_pipeline.settle(_PATIENCE)
    spread_pipeline.assert_equal()
    assert daemon.terminate(60) == 0

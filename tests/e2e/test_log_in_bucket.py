"""From Postgres to all three stores with the log in a bucket, through the death of every process and of the bucket."""

from typing import Any

import pytest
import yaml

from tests.e2e.test_pipeline import customers_at_work
from tests.fix_pipeline import Pipeline
from tests.fix_processes import RunProgram
from tests.fix_s3 import S3Server

pytestmark = pytest.mark.spark


@pytest.fixture
def bucket_pipeline(pipeline: Pipeline, s3_server: S3Server, s3_url: str) -> Pipeline:
    """The shop's pipeline with its log in a bucket; not started yet."""
    sections: dict[str, Any] = yaml.safe_load(pipeline.config.read_text(encoding="utf-8"))
    options = s3_server.storage_options
    sections["log"] = {"kind": "segments", "uri": s3_url, "storage_options": options, "hot_segments": 16}
    pipeline.config.chmod(0o600)
    pipeline.config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    pipeline.reopen()
    return pipeline


def test_capture_apply_and_the_bucket_are_killed_and_the_stores_end_equal(
    bucket_pipeline: Pipeline, s3_server: S3Server, run_program: RunProgram
) -> None:
    daemon = bucket_pipeline.start()
    bucket_pipeline.settle()
    with customers_at_work(bucket_pipeline):
        bucket_pipeline.kill("capture")
        bucket_pipeline.settle()
        s3_server.kill()
        s3_server.start()
        bucket_pipeline.settle()
        bucket_pipeline.kill("apply")
        bucket_pipeline.settle()
    bucket_pipeline.settle()
    bucket_pipeline.assert_equal()
    config = str(bucket_pipeline.config)
    for command in (("status",), ("doctor",), ("lag", "--json"), ("log", "positions"), ("log", "tail")):
        said = run_program("-m", "cdc.cli.main", *command, "--config", config)
        assert said.wait() == 0, said.said()
        assert s3_server.storage_options["aws_secret_access_key"] not in said.said()
    assert daemon.terminate(60) == 0
    assert s3_server.storage_options["aws_secret_access_key"] not in daemon.said()

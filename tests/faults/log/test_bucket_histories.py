"""Any sequence of appends, spools, merges, crashes and restarts, in a bucket."""

from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from cdc.log.segments.log import SegmentSettings
from cdc.log.segments.reader import SegmentReader
from cdc.log.segments.storage import LogLocation
from tests.fix_s3 import S3Server
from tests.scenes.segment_logs import bucket_reader, bucket_writer, location
from tests.unit.log.test_random_histories import LogMachine


@pytest.mark.parametrize("machines", ["one", "many"])
def test_any_history_ends_in_the_same_log_as_a_list_would(
    s3_server: S3Server, s3_url: str, tmp_path: Path, machines: str
) -> None:
    """With `many`, each writer is on a machine of its own: no file lock is between them."""

    class BucketMachine(LogMachine):
        def open(self) -> None:
            if not hasattr(self, "where"):
                self.where: LogLocation = location(f"{s3_url}/{uuid4().hex}", s3_server.storage_options)
            folder = tmp_path / (uuid4().hex if machines == "many" else self.root.name)
            self.writer = bucket_writer(self.where, folder, SegmentSettings(hot_segments=3, retention_hours=1e6))

        def reader(self) -> SegmentReader:
            if not hasattr(self, "kept"):
                self.kept = bucket_reader(self.where)
            return self.kept

    limits = settings(
        max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(BucketMachine, settings=limits)

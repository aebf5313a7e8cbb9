"""From Postgres into Kafka by the real reader: snapshot, stream, a broker that goes away meanwhile."""

from pathlib import Path
from typing import Any

import pytest

from cdc.log.kafka.settings import KafkaSettings
from tests.fix_processes import RunProgram
from tests.fix_servers import Database, LocalServer, MakeKafka
from tests.scenes.logs_elsewhere import (
    SETUP,
    ElsewhereRig,
    assert_complete,
    assert_snapshot_and_stream_arrive_whole,
    changes,
)

pytestmark = pytest.mark.kafka


def test_snapshot_and_stream_arrive_whole_in_kafka(
    kafka_server: LocalServer, database: Database, topic_prefix: str, state_dir: Path, run_program: RunProgram
) -> None:
    log = KafkaSettings(bootstrap=kafka_server.url, prefix=topic_prefix)
    assert_snapshot_and_stream_arrive_whole(ElsewhereRig(database, state_dir, run_program, log))


def test_capture_waits_for_a_broker_and_loses_nothing(
    private_kafka: MakeKafka, database: Database, topic_prefix: str, state_dir: Path, run_program: RunProgram
) -> None:
    server = private_kafka()
    log = KafkaSettings(bootstrap=server.url, prefix=topic_prefix)
    rig = ElsewhereRig(database, state_dir, run_program, log)
    rig.capture_tables(*SETUP, snapshot="never")
    rig.begin()
    rig.database.execute("truncate items")
    with rig.following() as following:
        changes(rig, 1000)
        following.reaches(rig.now())
        server.kill()
        changes(rig, 2000)
        held: Any = rig.confirmed()
        assert held <= rig.now()
        server.start()
        following.reaches(rig.now(), 120)
        assert rig.confirmed() >= held
    assert_complete(rig)

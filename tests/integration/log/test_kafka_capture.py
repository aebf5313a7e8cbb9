"""From Postgres into Kafka by the real reader: snapshot, stream, a broker that goes away meanwhile."""

from pathlib import Path
from typing import Any

import pytest

from cdc.config.settings import Settings
from cdc.log.kafka.settings import KafkaSettings
from tests.fix_capture import Rig
from tests.fix_processes import RunProgram
from tests.fix_servers import Database, LocalServer, MakeKafka

pytestmark = pytest.mark.kafka
SETUP = (
    "create table items (id int primary key, name text, price numeric, doc jsonb)",
    "insert into items select g, 'n' || g, g / 8.0, jsonb_build_object('g', g) from generate_series(1, 500) g",
)


class KafkaRig(Rig):
    """The same pipeline with its log in Kafka."""

    def __init__(self, database: Database, state: Path, run_program: RunProgram, log: KafkaSettings) -> None:
        super().__init__(database, state, run_program)
        self._log = log

    @property
    def settings(self) -> Settings:
        return Settings.model_validate({"state": self.state, "source": self.source, "log": self._log})


def changes(rig: Rig, first: int) -> None:
    rig.database.execute(
        f"insert into items select g, 'new', 0.10, '{{}}' from generate_series({first}, {first + 99}) g",
        f"update items set price = price * 2, name = 'u{first}' where id % 3 = 0",
        f"delete from items where id % 7 = {first % 7}",
        f"update items set id = id + 100000 where id = {first + 50}",
    )


def assert_complete(rig: Rig) -> None:
    rig.assert_equal("public.items")
    rig.assert_once_in_order()


def test_snapshot_and_stream_arrive_whole_in_kafka(
    kafka_server: LocalServer, database: Database, topic_prefix: str, state_dir: Path, run_program: RunProgram
) -> None:
    log = KafkaSettings(bootstrap=kafka_server.url, prefix=topic_prefix)
    rig = KafkaRig(database, state_dir, run_program, log)
    rig.capture_tables(*SETUP, snapshot="initial")
    rig.begin()
    for first in (1000, 2000):  # the second time over a restart
        changes(rig, first)
        with rig.following() as following:
            changes(rig, first + 500)
            following.reaches(rig.now())
    assert_complete(rig)


def test_capture_waits_for_a_broker_and_loses_nothing(
    private_kafka: MakeKafka, database: Database, topic_prefix: str, state_dir: Path, run_program: RunProgram
) -> None:
    server = private_kafka()
    log = KafkaSettings(bootstrap=server.url, prefix=topic_prefix)
    rig = KafkaRig(database, state_dir, run_program, log)
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

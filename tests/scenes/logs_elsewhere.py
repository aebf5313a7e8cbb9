"""From Postgres by the real reader into a log that is not in the state folder."""

from pathlib import Path

from cdc.config.settings import LogSettings, Settings
from tests.fix_capture import Rig
from tests.fix_processes import RunProgram
from tests.fix_servers import Database

SETUP = (
    "create table items (id int primary key, name text, price numeric, doc jsonb)",
    "insert into items select g, 'n' || g, g / 8.0, jsonb_build_object('g', g) from generate_series(1, 500) g",
)


class ElsewhereRig(Rig):
    """The same pipeline with its log in Kafka or in a bucket."""

    def __init__(self, database: Database, state: Path, run_program: RunProgram, log: LogSettings) -> None:
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


def assert_snapshot_and_stream_arrive_whole(rig: Rig) -> None:
    rig.capture_tables(*SETUP, snapshot="initial")
    rig.begin()
    for first in (1000, 2000):  # the second time over a restart
        changes(rig, first)
        with rig.following() as following:
            changes(rig, first + 500)
            following.reaches(rig.now())
    assert_complete(rig)

"""The source fails over: a real PostgreSQL 17, its standby with synchronized slots, and a promotion."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdc.artifacts.progress import silent
from cdc.capture.source import doctor
from cdc.capture.source.doctor import Verdict
from cdc.errors import PositionMismatch
from cdc.service.capture import resync
from deploy.local import postgres, postgres_versions
from tests.fix_capture import Rig
from tests.fix_processes import wait_until
from tests.fix_servers import Database, MakePostgres, PostgresServer, fresh_database

ITEMS = "create table items (id int primary key, label text)"
SLOT = "replica"


class Servers:
    """A primary, and a standby made from a copy of its files."""

    def __init__(self, make: MakePostgres) -> None:
        self.primary = make()
        self.primary.execute(f"select pg_create_physical_replication_slot('{SLOT}', true)")
        access = f"host=127.0.0.1 port={self.primary.port} user=postgres dbname=postgres"
        self.standby = make(
            {
                "primary_conninfo": f"{access} password={self.primary.password}",
                "primary_slot_name": SLOT,
                "hot_standby_feedback": "on",
                "sync_replication_slots": "on",
            }
        )

    def copy(self) -> None:
        """Make the standby one: of the primary as it is now."""
        self.primary.stop()
        self.standby.stop()
        cluster = self.standby.data / "cluster"
        owner = cluster.stat()
        shutil.rmtree(cluster)
        shutil.copytree(self.primary.data / "cluster", cluster)
        shutil.rmtree(cluster / "pg_replslot")
        (cluster / "pg_replslot").mkdir(mode=0o700)
        (cluster / "standby.signal").touch()
        for path in (cluster, *cluster.rglob("*")):
            shutil.chown(path, owner.st_uid, owner.st_gid)
        shutil.copyfile(_passfile(self.primary), _passfile(self.standby))
        self.primary.start()
        self.standby.start()

    def wait_synced(self, rig: Rig) -> None:
        """Wait until the standby has the slot for good: it keeps it once the slot has moved on the primary."""
        query = "select 1 from pg_replication_slots where slot_name = %s and synced and not temporary"

        def synced() -> bool:
            self.primary.execute("select pg_log_standby_snapshot()")
            rig.database.execute("update items set label = 'moved' where id = 1")
            with self.standby.connect() as connection:
                return connection.execute(query, (rig.source["slot"],)).fetchone() is not None

        with rig.following():
            wait_until(synced, 30, "the slot on the standby")

    def promote(self, rig: Rig) -> None:
        """Lose the primary, promote the standby, and point the pipeline at it."""
        self.primary.kill()
        self.standby.start()
        with self.standby.connect() as connection:
            assert connection.execute("select pg_promote(true, 60)").fetchone() == (True,)
        rig.database = Database(self.standby, rig.database.name)
        rig.source["port"] = self.standby.port


def _passfile(server: PostgresServer) -> Path:
    return Path(server.dsn().rpartition("passfile=")[2])


@pytest.fixture
def servers(private_postgres: MakePostgres, monkeypatch: pytest.MonkeyPatch) -> Servers:
    folder = postgres_versions.binaries(17, silent)
    monkeypatch.setattr(postgres, "_system_folders", lambda: [folder])
    return Servers(private_postgres)


@pytest.fixture
def replicated(servers: Servers, make_rig: Callable[[Database], Rig]) -> Iterator[Rig]:
    """A pipeline over a database of both servers, with rows and a failover slot that the standby has."""
    with contextlib.ExitStack() as stack:
        database = fresh_database(servers.primary)
        rig = make_rig(database.__enter__())
        stack.callback(servers.primary.stop)
        servers.copy()
        rig.capture_tables(ITEMS, "insert into items select g, 'old' from generate_series(1, 20) g", snapshot="initial")
        rig.begin()
        rig.follow("update items set label = 'seen' where id < 5")
        servers.wait_synced(rig)
        yield rig


def test_after_a_promotion_capture_continues_on_the_standby_from_where_it_was(
    servers: Servers, replicated: Rig
) -> None:
    rig = replicated
    found = {one.check: one for one in doctor.examine(rig.settings.source)}
    assert found["failover"].verdict is Verdict.WARN
    assert f"synchronized_standby_slots = '{SLOT}'" in found["failover"].remedy
    servers.primary.execute(f"alter system set synchronized_standby_slots = '{SLOT}'")
    servers.primary.execute("select pg_reload_conf()")
    rig.follow("delete from items where id = 7", "insert into items values (100, 'before')")
    assert {one.check: one for one in doctor.examine(rig.settings.source)}["failover"].verdict is Verdict.OK
    servers.promote(rig)
    rig.follow("update items set label = 'after' where id > 15", "insert into items values (101, 'after')")
    rig.assert_equal()
    rig.assert_once_in_order()


def test_a_promoted_server_that_lacks_changes_of_the_log_is_refused_and_a_resync_ends_equal(
    servers: Servers, replicated: Rig
) -> None:
    rig = replicated
    servers.standby.stop()
    rig.follow(
        "delete from items where id = 7",
        "insert into items select g, 'lost with the primary' from generate_series(100, 300) g",
        "update items set label = 'lost with the primary' where id = 1",
    )
    servers.promote(rig)
    rig.database.execute("insert into items values (500, 'on the new primary')")
    with rig.following() as following:
        error = following.error()
    assert isinstance(error, PositionMismatch)
    assert "millrace resync" in error.remedy
    resync.request(rig.settings)
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute("insert into items values (501, 'after')", "delete from items where id = 9")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal()
    labels = {image["label"] for image in rig.folded("public.items").values()}
    assert "lost with the primary" not in labels

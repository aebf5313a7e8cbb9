"""Slot, server or publication are not what the log was filled from: a clear error, never a silent gap."""

import shutil
import subprocess
from pathlib import Path

import psycopg
import pytest

from cdc.artifacts.progress import silent
from cdc.capture.replication.connection import run_command
from cdc.capture.source import slot
from cdc.capture.source.connect import connect
from cdc.errors import PositionMismatch, SlotLost, SourceError, SourceRefused
from deploy.local import postgres, postgres_versions
from tests.fix_capture import MakeRig, Rig
from tests.fix_processes import wait_until
from tests.fix_servers import MakePostgres, PostgresServer

ITEMS = "create table items (id int primary key, label text)"


@pytest.fixture
def items(rig: Rig) -> Rig:
    """A captured table with some rows in the log."""
    rig.capture_tables(ITEMS)
    rig.begin()
    _write(rig, 1)
    return rig


def _write(rig: Rig, key: int) -> None:
    rig.follow(f"insert into items values ({key}, 'x')")


def _refusal(rig: Rig) -> SourceError:
    """How the next start fails; nothing may have been appended."""
    before = len(rig.rows())
    with rig.following() as following:
        error = following.error()
    assert isinstance(error, SourceError)
    assert not error.transient
    assert error.remedy
    assert len(rig.rows()) == before
    return error


def test_a_slot_dropped_while_we_were_away_is_an_error_and_is_not_made_again(items: Rig) -> None:
    items.database.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = current_database()"
    )
    error = _refusal(items)
    assert isinstance(error, SlotLost) and "resync" in error.remedy
    with connect(items.settings.source) as connection:
        assert slot.find(connection, items.source["slot"]) is None


def test_a_slot_dropped_and_made_again_is_an_error(items: Rig) -> None:
    name = items.source["slot"]
    items.database.execute(
        f"select pg_drop_replication_slot('{name}')",
        "insert into items values (2, 'in the gap')",
        f"select pg_create_logical_replication_slot('{name}', 'pgoutput')",
    )
    assert isinstance(_refusal(items), PositionMismatch)


def test_a_slot_moved_ahead_by_hand_is_an_error(items: Rig) -> None:
    items.database.execute(
        "insert into items values (2, 'skipped')",
        f"select pg_replication_slot_advance('{items.source['slot']}', pg_current_wal_lsn())",
    )
    error = _refusal(items)
    assert isinstance(error, PositionMismatch) and "moved by hand" in error.message


def test_an_idle_slot_that_we_moved_ourselves_is_no_error(items: Rig) -> None:
    with items.following() as following:
        items.database.execute("create table beside as select g from generate_series(1, 1000) g")
        wanted = items.now()
        wait_until(lambda: items.confirmed() >= wanted, 30, "the slot to follow the idle stretch")
        assert not following.raised
    _write(items, 2)
    items.assert_equal()


def test_an_invalidated_slot_is_named_as_such(private_rig: MakeRig) -> None:
    rig = private_rig({"max_slot_wal_keep_size": "16MB", "max_wal_size": "32MB", "min_wal_size": "32MB"})
    rig.capture_tables(ITEMS)
    rig.begin()
    rig.database.execute("create table beside (t text)")
    for _ in range(4):
        rig.database.execute("insert into beside select repeat(md5(g::text), 30) from generate_series(1, 20000) g")
        rig.database.execute("select pg_switch_wal()", "checkpoint")
    assert rig.ask("select wal_status from pg_replication_slots where slot_name = %s", rig.source["slot"]) == "lost"
    error = _refusal(rig)
    assert isinstance(error, SlotLost) and "max_slot_wal_keep_size" in error.remedy


def test_another_server_behind_the_same_address_is_an_error(items: Rig, private_postgres: MakePostgres) -> None:
    other = private_postgres()
    items.source["port"], items.source["password"] = other.port, other.password
    other.execute(f"create database {items.database.name}")
    error = _refusal(items)
    assert isinstance(error, PositionMismatch) and "system" in error.message


def test_a_source_restored_from_a_backup_is_an_error(private_rig: MakeRig, tmp_path: Path) -> None:
    rig = private_rig()
    server = rig.database.server
    rig.capture_tables(ITEMS)
    rig.begin()
    _write(rig, 1)
    server.stop()
    backup = tmp_path / "backup"
    subprocess.run(["cp", "-a", str(server.data), str(backup)], check=True)
    server.start()
    rig.database.execute("insert into items select g, 'x' from generate_series(10, 5000) g", "select pg_switch_wal()")
    _write(rig, 2)
    server.stop()
    shutil.rmtree(server.data)
    subprocess.run(["cp", "-a", str(backup), str(server.data)], check=True)
    server.start()
    error = _refusal(rig)
    assert isinstance(error, PositionMismatch) and "restored from a backup" in error.message


def test_a_promoted_standby_without_the_slot_is_an_error_and_gets_none(private_rig: MakeRig) -> None:
    rig = private_rig()
    server = rig.database.server
    rig.capture_tables(ITEMS)
    rig.begin()
    _write(rig, 1)
    # A point-in-time recovery of the same data: the same system, a new timeline, no slots.
    server.stop()
    cluster = next(server.data.rglob("PG_VERSION")).parent
    shutil.rmtree(cluster / "pg_replslot" / rig.source["slot"])
    _promote(server)
    error = _refusal(rig)
    assert isinstance(error, SlotLost) and "timeline 1, now 2" in error.message


@pytest.mark.parametrize("lost", [False, True])
def test_a_failover_slot_is_followed_unless_the_promoted_standby_lacks_what_the_log_has(
    private_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    folder = postgres_versions.binaries(17, silent)  # the first with failover slots
    monkeypatch.setattr(postgres, "_system_folders", lambda: [folder])
    rig = private_rig()
    server = rig.database.server
    rig.capture_tables(ITEMS)
    rig.begin()
    with connect(rig.settings.source, replication=True) as replication:
        run_command(
            replication.pgconn, f'ALTER_REPLICATION_SLOT "{rig.source["slot"]}" (FAILOVER true)', lambda _: None
        )
    _write(rig, 1)
    server.stop()
    standby = tmp_path / "standby"
    subprocess.run(["cp", "-a", str(server.data), str(standby)], check=True)
    if lost:
        server.start()
        _write(rig, 2)
        server.stop()
    shutil.rmtree(server.data)
    subprocess.run(["cp", "-a", str(standby), str(server.data)], check=True)
    _promote(server)
    rig.database.execute("insert into items select g, 'x' from generate_series(10, 5000) g", "select pg_switch_wal()")
    if lost:
        error = _refusal(rig)
        assert isinstance(error, PositionMismatch) and "left that timeline" in error.message
        assert "resync" in error.remedy
        return
    _write(rig, 6000)
    _write(rig, 6001)  # a start that finds the log beyond the fork, on the timeline that it noted
    rig.assert_equal()


def _promote(server: PostgresServer) -> None:
    cluster = next(server.data.rglob("PG_VERSION")).parent
    (cluster / "standby.signal").touch()
    owner = cluster.stat()
    subprocess.run(["chown", f"{owner.st_uid}:{owner.st_gid}", str(cluster / "standby.signal")], check=True)
    server.start()
    server.execute("select pg_promote(true)")


@pytest.mark.parametrize(
    "change",
    [
        "alter publication {p} set table items where (id > 5)",
        "alter publication {p} set table items (id)",
        "alter publication {p} set (publish = 'insert')",
        "alter publication {p} drop table items",
        "drop publication {p}",
    ],
)
def test_a_publication_changed_by_hand_while_we_run_is_noticed(items: Rig, change: str) -> None:
    program = items.start()
    items.wait_caught_up(program)
    items.database.execute(change.format(p=items.settings.source.publication))
    assert program.wait(30) == 1
    said = items.status()["error"]
    assert "ublication" in said["message"] and said["remedy"]


def test_a_publication_changed_while_we_were_away_is_noticed(items: Rig) -> None:
    name = items.settings.source.publication
    items.database.execute(f"alter publication {name} set table items where (id > 5)")
    program = items.start()
    assert program.wait(60) == 1
    assert "row filter" in items.status()["error"]["message"]


def test_a_row_filter_added_to_the_pipeline_asks_for_a_new_snapshot(items: Rig) -> None:
    items.source["tables"] = [{"name": "public.items", "snapshot": "never", "where": "id > 0"}]
    program = items.start()
    assert program.wait(60) == 1
    assert "row filter" in items.status()["error"]["message"]


def test_tables_that_the_pipeline_gains_and_gives_up_are_followed(items: Rig) -> None:
    items.database.execute(
        "create table gained (id int primary key, label text)", "insert into gained values (1, 'before'), (2, 'before')"
    )
    items.source["tables"] = [{"name": "public.gained", "snapshot": "initial"}]
    program = items.start()
    items.wait_caught_up(program)
    items.database.execute(
        "insert into gained values (3, 'after')",
        "update gained set label = 'after' where id = 2",
        "insert into items values (99, 'given up')",
    )
    wait_until(lambda: len(items.folded("public.gained")) == 3, 60, "the backfill of the table that was gained")
    items.wait_caught_up(program)
    assert program.terminate() == 0
    items.assert_equal("public.gained")
    assert '{"id":99}' not in items.folded("public.items")


def test_a_slot_dropped_while_we_run_is_an_error(items: Rig) -> None:
    with items.following() as following:
        following.reaches(items.now())
        name = items.source["slot"]
        with items.database.connect() as connection:
            connection.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", (name,)
            )

            def dropped() -> bool:
                try:
                    connection.execute("select pg_drop_replication_slot(%s)", (name,))
                except psycopg.errors.ObjectInUse:
                    connection.execute(
                        "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s",
                        (name,),
                    )
                    return False
                return True

            wait_until(dropped, 30, "the slot to be dropped")
        assert isinstance(following.error(), SlotLost)


def test_a_slot_of_somebody_else_is_never_taken_over(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    rig.database.execute(f"select pg_create_logical_replication_slot('{rig.source['slot']}', 'pgoutput')")
    with pytest.raises(SourceRefused, match="not created for this log"):
        rig.begin()

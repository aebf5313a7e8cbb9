"""The first snapshot into a real log from a real Postgres: exact, complete, and refusing what it cannot read."""

import json
import threading
from typing import Any

import pytest

import cdc.log
from cdc.capture.source import slot as slots
from cdc.config.settings import Settings
from cdc.errors import SourceLost, SourceRefused
from cdc.model import Lsn, TableId, parse_lsn
from snapshots.backfill.jobs import missing
from snapshots.initial import plan, snapshot
from snapshots.initial.snapshot import EXACT_MARK, STATE_MARK, SnapshotProgress, run_initial
from tests.fix_processes import wait_until
from tests.fix_servers import Database
from tests.scenes.snapshot import MakeSettings, images, logged, pipeline, take_snapshot


def test_every_row_is_in_the_log_once_with_the_slots_versions(database: Database, settings_of: MakeSettings) -> None:
    database.execute(
        "create table item (id int primary key, name text, price numeric)",
        "insert into item select g, 'n' || g, g / 10.0 from generate_series(1, 1000) g",
    )
    settings = pipeline(settings_of, database, "public.item")
    writer = cdc.log.open_writer(settings)
    with slots.create(settings.source, 30, lambda text: None) as made:
        run_initial(settings, made, writer)
    marks = writer.progress().marks
    assert writer.progress().end == made.consistent_point
    writer.close()
    rows = logged(settings)
    assert rows.num_rows == 1000
    assert set(rows["op"].to_pylist()) == {"r"}
    assert set(rows["version"].to_pylist()) == {made.restart_lsn}
    assert set(rows["commit_lsn"].to_pylist()) == {made.consistent_point - 1}
    assert rows["ordinal"].to_pylist() == list(range(1000))
    assert images(rows)['{"id":7}'] == {"id": 7, "name": "n7", "price": 0.7}
    assert json.loads(marks[STATE_MARK]) == {"state": "done", "rows": 1000}
    assert EXACT_MARK in marks


def test_nobody_has_reached_the_consistent_point_before_the_last_entry(
    database: Database, settings_of: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LEAST_PAGES", 8)
    database.execute(
        "create table item (id int primary key, filler text)",
        "insert into item select g, repeat('x', 200) from generate_series(1, 5000) g",
    )
    settings = pipeline(settings_of, database, "public.item")
    take_snapshot(settings)
    reader = cdc.log.open_reader(settings)
    *ends, last = [piece.end for piece in reader.read(reader.start())]
    assert len(ends) > 4
    assert set(ends) == {last - 1}
    assert reader.head()[1] == last


def test_a_big_table_is_read_by_several_workers_and_every_row_once(
    database: Database, settings_of: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LEAST_PAGES", 8)
    database.execute(
        "create table big (id int primary key, filler text)",
        "insert into big select g, repeat('x', 200) from generate_series(1, 20000) g",
        "delete from big where id % 7 = 0",
    )
    seen: list[SnapshotProgress] = []
    settings = pipeline(settings_of, database, "public.big", snapshot_workers=4)
    rows = take_snapshot(settings, seen.append)
    keys = rows["key"].to_pylist()
    assert len(keys) == len(set(keys)) == 20000 - 20000 // 7
    assert rows["ordinal"].to_pylist() == list(range(rows.num_rows))
    assert len(seen) > 8
    assert seen[-1].tables_done == seen[-1].tables == 1
    assert seen[-1].rows == rows.num_rows


def test_a_partitioned_table_is_one_table_under_its_roots_name(database: Database, settings_of: MakeSettings) -> None:
    database.execute(
        "create table part (id int, place text, primary key (id, place)) partition by list (place)",
        "create table part_a partition of part for values in ('a')",
        "create table part_b partition of part for values in ('b') partition by range (id)",
        "create table part_b_low (place text, id int, primary key (id, place))",
        "alter table part_b attach partition part_b_low for values from (0) to (1000)",
        "insert into part select g, case when g % 2 = 0 then 'a' else 'b' end from generate_series(1, 100) g",
    )
    rows = take_snapshot(pipeline(settings_of, database, "public.part"))
    assert rows.num_rows == 100
    assert set(rows["table"].to_pylist()) == {"public.part"}
    assert images(rows)['{"id":3,"place":"b"}'] == {"id": 3, "place": "b"}


def test_a_partitioned_table_is_read_through_its_root_where_only_that_is_granted(
    database: Database, settings_of: MakeSettings, reader_role: str
) -> None:
    database.execute(
        "create table part (id int primary key) partition by range (id)",
        "create table part_low partition of part for values from (0) to (1000)",
        "insert into part select generate_series(1, 50)",
        f"grant select on part to {reader_role}",
    )
    settings = pipeline(settings_of, database, "public.part", user=reader_role, password="reader-secret")
    assert take_snapshot(settings).num_rows == 50


def test_children_by_inheritance_are_not_rows_of_their_parent(database: Database, settings_of: MakeSettings) -> None:
    database.execute(
        "create table parent (id int primary key)",
        "create table child () inherits (parent)",
        "insert into parent values (1)",
        "insert into child values (2)",
    )
    assert take_snapshot(pipeline(settings_of, database, "public.parent"))["key"].to_pylist() == ['{"id":1}']


def test_columns_filters_and_masks_of_the_table_are_applied(database: Database, settings_of: MakeSettings) -> None:
    database.execute(
        "create table person (id int primary key, name text, mail text, salary int, note text)",
        "insert into person values (1, 'Ann', 'ann@example.org', 10, 'n'), (2, 'Bob', 'bob@example.org', 20, 'n')",
    )
    table = {
        "name": "public.person",
        "columns": ["id", "name", "mail", "salary"],
        "mask": {"mail": "hash", "salary": "drop", "name": "mask"},
        "where": "id < 2",
    }
    rows = take_snapshot(pipeline(settings_of, database, table, mask_key="a key"))
    assert rows.num_rows == 1
    row = images(rows)['{"id":1}']
    assert sorted(row) == ["id", "mail", "name"]
    assert row["name"] == "***"
    assert len(row["mail"]) == 64


def test_names_that_need_quoting_are_read(database: Database, settings_of: MakeSettings) -> None:
    database.execute(
        'create schema "Odd . ""Schema"""',
        'create table "Odd . ""Schema"""."a; drop table x; --" ("select" int primary key, "Ü {} %s" text)',
        'insert into "Odd . ""Schema"""."a; drop table x; --" values (1, E\'tab\\there\\\\ and \\n line\')',
    )
    name = str(TableId('Odd . "Schema"', "a; drop table x; --"))
    rows = take_snapshot(pipeline(settings_of, database, name))
    assert images(rows)['{"select":1}'] == {"select": 1, "Ü {} %s": "tab\there\\ and \n line"}


def test_tables_that_never_want_a_snapshot_have_none(database: Database, settings_of: MakeSettings) -> None:
    database.execute("create table a (id int primary key)", "create table b (id int primary key)")
    database.execute("insert into a values (1)", "insert into b values (1)")
    settings = pipeline(settings_of, database, "public.a", {"name": "public.b", "snapshot": "never"})
    assert take_snapshot(settings)["table"].to_pylist() == ["public.a"]


@pytest.fixture
def reader_role(database: Database) -> Any:
    """A role that may replicate and nothing else."""
    role = database.name + "_reader"
    database.execute(f"create role {role} login replication password 'reader-secret'")
    yield role
    database.execute(f"drop owned by {role}", f"drop role {role}")


def refused(settings: Settings) -> SourceRefused:
    writer = cdc.log.open_writer(settings)
    try:
        with (
            slots.create(settings.source, 30, lambda text: None) as made,
            pytest.raises(SourceRefused) as caught,
        ):
            run_initial(settings, made, writer)
        assert not writer.progress().marks
    finally:
        writer.close()
    return caught.value


def test_a_missing_grant_is_named_with_its_remedy(
    database: Database, settings_of: MakeSettings, reader_role: str
) -> None:
    database.execute("create table secret (id int primary key)", "insert into secret values (1)")
    error = refused(pipeline(settings_of, database, "public.secret", user=reader_role, password="reader-secret"))
    assert "public.secret" in error.message
    assert f'GRANT SELECT ON "public"."secret" TO "{reader_role}"' in error.remedy


def test_row_security_stops_the_snapshot_instead_of_emptying_it(
    database: Database, settings_of: MakeSettings, reader_role: str
) -> None:
    """Scenario 15: the role would read 0 rows without an error."""
    database.execute(
        "create table guarded (id int primary key)",
        "insert into guarded values (1)",
        "alter table guarded enable row level security",
        f"grant select on guarded to {reader_role}",
    )
    error = refused(pipeline(settings_of, database, "public.guarded", user=reader_role, password="reader-secret"))
    assert "public.guarded" in error.message
    assert "BYPASSRLS" in error.remedy


def test_a_table_that_does_not_exist_is_named(database: Database, settings_of: MakeSettings) -> None:
    assert "public.nothing" in refused(pipeline(settings_of, database, "public.nothing")).message


def test_a_table_rewritten_after_the_snapshot_was_exported_is_not_taken_for_empty(
    database: Database, settings_of: MakeSettings
) -> None:
    database.execute("create table moved (id int primary key, v int)", "insert into moved values (1, 1)")
    settings = pipeline(settings_of, database, "public.moved")
    writer = cdc.log.open_writer(settings)
    with slots.create(settings.source, 30, lambda text: None) as made:
        database.execute("alter table moved alter column v type bigint using v")
        with pytest.raises(SourceLost, match=r"public\.moved was rewritten"):
            run_initial(settings, made, writer)
    writer.close()


def test_no_lock_beyond_access_share_is_held(database: Database, settings_of: MakeSettings) -> None:
    database.execute("create table item (id int primary key)", "insert into item values (1)")
    settings = pipeline(settings_of, database, "public.item")
    locks: set[str] = set()

    def look(progress: SnapshotProgress) -> None:
        with database.connect() as connection:
            locks.update(
                row[0]
                for row in connection.execute(
                    "select mode from pg_locks l join pg_stat_activity a using (pid)"
                    " where a.application_name = 'millrace snapshot' and l.locktype = 'relation'"
                )
            )

    take_snapshot(settings, look)
    assert locks == {"AccessShareLock"}


def test_writers_during_the_snapshot_are_neither_blocked_nor_seen(
    database: Database, settings_of: MakeSettings
) -> None:
    database.execute("create table item (id int primary key, v int)", "insert into item values (1, 1), (2, 1)")
    settings = pipeline(settings_of, database, "public.item")
    writer = cdc.log.open_writer(settings)
    with slots.create(settings.source, 30, lambda text: None) as made:
        database.execute(
            "update item set v = 2 where id = 1", "delete from item where id = 2", "insert into item values (3, 3)"
        )
        run_initial(settings, made, writer)
    writer.close()
    assert images(logged(settings)) == {'{"id":1}': {"id": 1, "v": 1}, '{"id":2}': {"id": 2, "v": 1}}


def test_a_truncate_that_waits_for_the_snapshot_does_not_stop_it(
    database: Database, settings_of: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the lock of one connection; another that queued behind it would wait for ever."""
    names = ("a", "b", "c")
    for name in names:
        database.execute(f"create table {name} (id int primary key)", f"insert into {name} values (1), (2)")
    settings = pipeline(settings_of, database, *(f"public.{name}" for name in names), snapshot_workers=3)
    truncate = threading.Thread(target=database.execute, args=("truncate a",), daemon=True)
    begun = snapshot._begin

    def begin_behind_a_truncate(*arguments: Any) -> None:
        truncate.start()
        wait_until(lambda: _waits_for_a_lock(database, "truncate"), 30, "the truncate to wait for the snapshot")
        begun(*arguments)

    monkeypatch.setattr(snapshot, "_begin", begin_behind_a_truncate)
    reading = threading.Thread(target=take_snapshot, args=(settings,), daemon=True)
    reading.start()
    wait_until(lambda: not reading.is_alive(), 30, "the snapshot's end")
    truncate.join(30)
    assert logged(settings).num_rows == 6


def _waits_for_a_lock(database: Database, verb: str) -> bool:
    with database.connect() as connection:
        waiting = "select from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
        return connection.execute(waiting, (f"{verb}%",)).fetchone() is not None


def test_an_update_open_around_the_consistent_point_beats_the_snapshots_row(
    database: Database, settings_of: MakeSettings
) -> None:
    """Scenario 6: its own LSN lies below the consistent point, and must still be above the snapshot's version."""
    database.execute("create table item (id int primary key, v text)", "insert into item values (1, 'old')")
    database.execute(f"create publication {database.name} for table item")
    settings = pipeline(settings_of, database, "public.item", publication=database.name)
    writer = cdc.log.open_writer(settings)
    a, b, c = (database.connect(autocommit=False) for _ in range(3))
    a.execute("select pg_current_xact_id()")
    created, go = threading.Event(), threading.Event()
    made_slots: list[slots.SlotCreated] = []

    def create() -> None:
        with slots.create(settings.source, 60, lambda text: None) as made:
            made_slots.append(made)
            created.set()
            assert go.wait(30)
            run_initial(settings, made, writer)

    thread = threading.Thread(target=create)
    thread.start()
    wait_until(lambda: a.info.backend_pid in holders(database), what="the slot waits for A")
    b.execute("select pg_current_xact_id()")
    a.commit()
    wait_until(lambda: b.info.backend_pid in holders(database), what="the slot waits for B")
    c.execute("update item set v = 'new' where id = 1")
    b.commit()
    assert created.wait(30)
    c.commit()
    go.set()
    thread.join(30)
    writer.close()
    for connection in (a, b, c):
        connection.close()
    rows = logged(settings)
    assert images(rows) == {'{"id":1}': {"id": 1, "v": "old"}}
    ((lsn, _),) = updates(database)
    assert rows["version"][0].as_py() < lsn < made_slots[0].consistent_point


def holders(database: Database) -> list[int]:
    """Whom the slot's creation waits for."""
    with database.connect() as connection:
        found = connection.execute(
            "select pg_blocking_pids(pid) from pg_stat_activity"
            " where application_name = 'millrace slot' and datname = %s",
            (database.name,),
        ).fetchone()
    return list(found[0]) if found else []


def updates(database: Database) -> list[tuple[Lsn, bytes]]:
    """The updates that the slot would stream, with their own LSNs."""
    with database.connect() as connection:
        rows = connection.execute(
            "select lsn::text, data from pg_logical_slot_peek_binary_changes(%s, null, null,"
            " 'proto_version', '1', 'publication_names', %s)",
            (database.name, database.name),
        ).fetchall()
    return [(parse_lsn(lsn), data) for lsn, data in rows if data[:1] == b"U"]


def test_a_snapshot_that_is_asked_to_stop_says_what_is_left(database: Database, settings_of: MakeSettings) -> None:
    names = [f"t{number}" for number in range(6)]
    database.execute(*(f"create table {name} as select 1 as id" for name in names))
    settings = pipeline(settings_of, database, *(f"public.{name}" for name in names), snapshot_workers=1)
    writer = cdc.log.open_writer(settings)
    stopping = threading.Event()
    with slots.create(settings.source, 30, lambda text: None) as made:
        assert not run_initial(settings, made, writer, lambda progress: stopping.set(), stopping)
    marks = writer.progress().marks
    writer.close()
    assert json.loads(marks[STATE_MARK]) == {"state": "reading"}
    assert marks[EXACT_MARK] == ""
    assert 0 < logged(settings).num_rows < 6
    assert len(missing(settings.source.tables, marks)) == 6 - logged(settings).num_rows

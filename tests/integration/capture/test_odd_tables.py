"""Tables at the edge of what Postgres allows, and names that change under a running reader."""

import json

import psycopg

from cdc.capture.source import doctor
from cdc.capture.source.doctor import Verdict
from tests.fix_capture import MakeRig, Rig
from tests.fix_processes import wait_until

ITEMS = "create table items (id int primary key, label text)"


def test_a_table_of_sixteen_hundred_columns_arrives_whole(rig: Rig) -> None:
    columns = ", ".join(f"c{number} smallint" for number in range(1599))
    rig.capture_tables(f"create table wide (id int primary key, {columns})")
    rig.begin()
    rig.follow(
        "insert into wide (id, c0, c1598) select g, g, -g from generate_series(1, 50) g",
        "update wide set c799 = id where id % 2 = 0",
        "delete from wide where id = 7",
    )
    rows = rig.folded("public.wide")
    assert len(rows) == 49
    assert all(len(row) == 1600 for row in rows.values())
    assert rows['{"id":4}'] == {
        "id": 4, **{f"c{number}": {0: 4, 799: 4, 1598: -4}.get(number) for number in range(1599)}
    }  # fmt: skip


def test_a_table_without_columns_is_refused_before_it_is_published(rig: Rig) -> None:
    rig.capture_tables(ITEMS, "create table nothing ()")
    failed = {found.object: found for found in doctor.examine(rig.settings.source) if found.verdict is Verdict.FAIL}
    assert "public.nothing" in failed and failed["public.nothing"].remedy
    assert "public.items" not in failed


def test_identity_and_generated_columns_are_what_the_source_sends(rig: Rig) -> None:
    rig.capture_tables(
        "create table items (id int generated always as identity primary key, n int,"
        " twice int generated always as (n * 2) stored)",
    )
    rig.begin()
    rig.follow("insert into items (n) values (5), (6)", "update items set n = 7 where n = 5")
    found = [json.loads(row["after"]) for row in rig.rows("public.items")]
    assert found == [{"id": 1, "n": 5}, {"id": 2, "n": 6}, {"id": 1, "n": 7}]


def test_views_temporary_and_unlogged_tables_are_quiet_in_a_publication_of_all_tables(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    name = rig.settings.source.publication
    rig.database.execute(f"create publication {name} for all tables with (publish_via_partition_root = true)")
    rig.begin()
    with rig.following() as following:
        rig.database.execute(
            "create view v as select * from items",
            "create unlogged table u (id int primary key)",
            "insert into u values (1)",
            "insert into items values (1, 'a')",
            "create materialized view m as select * from items",
            "refresh materialized view m",
        )
        with psycopg.connect(rig.database.dsn, autocommit=True) as session:
            session.execute("create temporary table t (id int primary key)")
            session.execute("insert into t values (1)")
        following.reaches(rig.now())
    assert {row["table"] for row in rig.rows()} == {"public.items"}
    rig.assert_equal()


def test_a_table_of_a_renamed_schema_waits_and_the_others_flow(rig: Rig) -> None:
    """PostgreSQL 15 goes on sending rows under the old name; the look at the publication from the side sees the new."""
    rig.database.execute("create schema shop", "create table shop.items (id int primary key, label text)", ITEMS)
    rig.source["tables"] = [{"name": name, "snapshot": "never"} for name in ("shop.items", "public.items")]
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute(
        "insert into shop.items values (1, 'before')",
        "alter schema shop rename to store",
        "insert into store.items values (2, 'after')",
    )
    wait_until(lambda: "shop.items" in rig.status().get("tables_waiting", {}), 30, "the table waits")
    assert "store.items" in rig.status()["tables_waiting"]["shop.items"]["remedy"]
    rig.database.execute("insert into items values (1, 'beside')")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal("public.items")
    assert {row["table"] for row in rig.rows()} <= {"shop.items", "public.items"}


def test_a_crash_of_postgres_keeps_prepared_transactions_as_they_were(private_rig: MakeRig) -> None:
    rig = private_rig({"max_prepared_transactions": "10"})
    server = rig.database.server
    rig.capture_tables(ITEMS)
    rig.begin()
    with rig.following() as following:
        rig.database.execute("begin; insert into items values (1, 'kept'); prepare transaction 'one'")
        rig.database.execute("begin; insert into items values (2, 'given up'); prepare transaction 'two'")
        rig.database.execute("insert into items values (3, 'beside')")
        following.reaches(rig.now())
        server.stop("immediate")
        server.start()
        rig.database.execute("insert into items values (4, 'later')")
        following.reaches(rig.now())
        assert sorted(rig.folded("public.items")) == ['{"id":3}', '{"id":4}']
        rig.database.execute("commit prepared 'one'", "rollback prepared 'two'")
        following.reaches(rig.now())
    rig.assert_equal()
    rig.assert_once_in_order()
    assert sorted(rig.folded("public.items")) == ['{"id":1}', '{"id":3}', '{"id":4}']


def test_a_server_without_a_free_sender_names_the_setting(private_rig: MakeRig) -> None:
    rig = private_rig({"max_wal_senders": "1"})
    rig.capture_tables(ITEMS)
    replication = psycopg.connect(f"{rig.database.dsn} replication=database", autocommit=True)
    try:
        failed = [found for found in doctor.examine(rig.settings.source) if found.verdict is Verdict.FAIL]
        assert any("max_wal_senders" in found.message for found in failed)
    finally:
        replication.close()

"""Tables that cannot be followed for now wait alone and are read again by themselves; others never pass capture."""

import json
import signal
from collections.abc import Iterator

import pytest

from cdc.capture.source import doctor
from cdc.capture.source.doctor import Verdict
from tests.fix_capture import Rig
from tests.fix_processes import Program, wait_until
from tests.integration.capture.test_tables_live import facts, name_tables

TABLES = (
    "create table items (id int primary key, label text)",
    "create table beside (id int primary key, label text)",
    "insert into items select g, 'l' || g from generate_series(1, 20) g",
)
NAMES = [{"name": "public.beside", "snapshot": "initial"}, {"name": "public.items", "snapshot": "initial"}]


@pytest.fixture
def two_tables(rig: Rig) -> Rig:
    """A pipeline of two tables, not started."""
    rig.capture_tables(*TABLES, snapshot="initial", heartbeat_seconds=0.5)
    return rig


@pytest.fixture
def running(two_tables: Rig) -> Iterator[tuple[Rig, Program]]:
    """A capture process that streams two tables."""
    program = two_tables.start()
    two_tables.wait_caught_up(program)
    yield two_tables, program
    program.kill()


def waits(rig: Rig, program: Program, table: str = "public.items") -> dict[str, str]:
    """Wait until the table waits; what is said of it. The other table flows."""
    wait_until(lambda: table in facts(rig, program).get("tables_waiting", {}), 60, f"{table} waits")
    rig.database.execute("insert into beside select coalesce(max(id), 0) + 1, 'flows' from beside")
    rig.wait_caught_up(program)
    rig.assert_equal("public.beside")
    said: dict[str, str] = facts(rig, program)["tables_waiting"].get(table, {})
    assert said["message"] and said["remedy"]
    return said


def resumed(rig: Rig, program: Program, table: str = "public.items") -> None:
    """Wait until nothing waits any more, and the table has what the source has."""
    wait_until(
        lambda: facts(rig, program).get("tables_waiting") == {} and any(row["op"] == "t" for row in rig.rows(table)),
        60,
        f"{table} is captured again",
    )
    rig.wait_caught_up(program)
    rig.assert_equal(table, "public.beside")


@pytest.mark.parametrize("scope", ["for all tables", "for tables in schema public", "by hand"])
def test_changes_of_tables_that_are_not_configured_never_pass_and_new_ones_stop_nothing(
    two_tables: Rig, scope: str
) -> None:
    rig = two_tables
    name = rig.settings.source.publication
    parted = "create table parted (id int primary key, secret text) partition by range (id)"
    rig.database.execute(parted, "create table part partition of parted for values from (0) to (10)")
    if scope != "by hand":
        rig.database.execute(f"create publication {name} {scope} with (publish_via_partition_root = true)")
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute(
        "create type mood as enum ('SECRET')", "create table other (id int primary key, secret text, mood mood)"
    )
    if scope == "by hand":
        rig.database.execute(f"alter publication {name} add table other, parted")
    rig.database.execute(
        "insert into other values (1, 'SECRET', 'SECRET')",
        "begin; insert into items values (100, 'wanted'); update other set secret = 'SECRET2';"
        " insert into parted values (1, 'SECRET'); insert into beside values (100, 'wanted'); truncate other; commit",
        "delete from parted",
        "create table later (id int primary key)",
        "drop table other",
    )
    looked = wait_until(lambda: facts(rig, program)["looked_at"], 30, "the first look at the publication")
    wait_until(lambda: facts(rig, program)["looked_at"] > looked, 30, "the publication is looked at again")
    if scope == "by hand":
        rig.database.execute(f"alter publication {name} drop table parted")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    program = rig.start()
    rig.database.execute("insert into parted values (2, 'SECRET')", "update items set label = 'wanted' where id = 1")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    assert {row["table"] for row in rig.rows()} == {"public.items", "public.beside"}
    rig.assert_equal("public.items", "public.beside")
    assert all(b"SECRET" not in path.read_bytes() for path in rig.state.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("lose", "give_back"),
    [
        ("alter table items replica identity nothing", "alter table items replica identity default"),
        ("drop index items_code", "alter table items replica identity default"),
    ],
    ids=["nothing", "index"],
)
def test_a_table_that_loses_its_replica_identity_waits_alone_and_its_application_goes_on(
    two_tables: Rig, lose: str, give_back: str
) -> None:
    rig = two_tables
    rig.database.execute(
        "alter table items alter label set not null", "create unique index items_code on items (label)"
    )
    if "index" in lose:
        rig.database.execute("alter table items replica identity using index items_code")
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute(lose, "insert into items values (50, 'without a key')")
    said = waits(rig, program)
    assert "UPDATE and DELETE" in said["message"] and "ALTER TABLE" in said["remedy"]
    rig.database.execute("delete from items where id <= 5", "update items set label = 'unseen' where id = 7")
    program.send(signal.SIGKILL)
    program.wait(60)
    program = rig.start()
    waits(rig, program)
    rig.database.execute(give_back, "update items set label = 'seen' where id = 8")
    resumed(rig, program)
    assert program.terminate() == 0


def test_the_identity_lost_in_a_publication_of_all_tables_is_said_to_harm_the_application(two_tables: Rig) -> None:
    rig = two_tables
    rig.database.execute(
        f"create publication {rig.settings.source.publication} for all tables with (publish_via_partition_root = true)"
    )
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute("alter table items replica identity nothing")
    assert "fail now" in waits(rig, program)["message"]
    rig.database.execute("alter table items replica identity full")
    resumed(rig, program)
    assert program.terminate() == 0


def test_a_renamed_table_waits_and_is_captured_under_its_new_name_or_again_under_the_old(
    running: tuple[Rig, Program],
) -> None:
    rig, program = running
    rig.database.execute("alter table items rename to things", "delete from things where id = 1")
    assert "public.things" in waits(rig, program)["remedy"]
    rig.database.execute("alter table things rename to items", "delete from items where id = 2")
    resumed(rig, program)
    rig.database.execute("create schema moved", "alter table items set schema moved")
    assert "moved.items" in waits(rig, program)["remedy"]
    assert program.terminate() == 0
    program = rig.start()
    waits(rig, program)
    name_tables(rig, program, "public.beside", "moved.items")
    wait_until(lambda: "moved.items" in facts(rig, program).get("captured", ()), 60, "the new name is captured")
    wait_until(lambda: len(rig.folded("moved.items")) == 18, 60, "its rows are read")
    assert facts(rig, program)["tables_waiting"] == {}
    assert program.terminate() == 0
    rig.assert_equal("moved.items", "public.beside")


def test_a_table_renamed_while_capture_was_away_waits_and_the_others_start(two_tables: Rig) -> None:
    rig = two_tables
    program = rig.start()
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.database.execute("alter table items rename to things")
    program = rig.start()
    waits(rig, program)
    assert program.terminate() == 0


def test_a_captured_table_that_becomes_a_partition_of_a_captured_one_waits_and_says_who_holds_its_rows(
    two_tables: Rig,
) -> None:
    rig = two_tables
    rig.database.execute("create table root (id int primary key, label text) partition by range (id)")
    rig.source["tables"] = [*NAMES, {"name": "public.root", "snapshot": "initial"}]
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute("alter table root attach partition items for values from (0) to (1000)")
    said = waits(rig, program)
    assert "changes of public.root" in said["message"] and "DETACH" in said["remedy"]
    rig.database.execute("update root set label = 'as the root' where id = 3", "delete from root where id = 4")
    rig.database.execute("alter table root detach partition items")
    resumed(rig, program)
    assert program.terminate() == 0


def test_a_root_and_its_partition_are_not_captured_together(two_tables: Rig) -> None:
    rig = two_tables
    rig.database.execute(
        "create table root (id int primary key, label text) partition by range (id)",
        "alter table root attach partition items for values from (0) to (1000)",
    )
    rig.source["tables"] = [*NAMES, {"name": "public.root", "snapshot": "initial"}]
    failed = [found for found in doctor.examine(rig.settings.source) if found.verdict is Verdict.FAIL]
    assert [(found.check, found.object) for found in failed] == [("partitions", "public.items")]
    assert rig.start().wait(60) == 1
    assert rig.ask("select count(*) from pg_publication") == 0


def test_a_table_whose_change_the_policy_refuses_waits_alone_until_it_is_undone(two_tables: Rig) -> None:
    rig = two_tables
    rig.source["schema_policy"] = "lenient"
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute("alter table items drop column label", "insert into items values (70)")
    assert "column label was dropped" in waits(rig, program)["message"]
    rig.database.execute("alter table items add column label text", "update items set label = 'back' where id = 3")
    resumed(rig, program)
    assert program.terminate() == 0


def test_the_policy_exception_stops_capture(two_tables: Rig) -> None:
    rig = two_tables
    rig.source["schema_policy"] = "exception"
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute("alter table items add column more text", "insert into items values (70)")
    assert program.wait(60) == 1
    assert "column more was added" in json.dumps(rig.status()["error"])


def test_a_table_made_again_in_a_publication_of_all_tables_begins_again(two_tables: Rig) -> None:
    rig = two_tables
    rig.database.execute(
        f"create publication {rig.settings.source.publication} for all tables with (publish_via_partition_root = true)"
    )
    program = rig.start()
    rig.wait_caught_up(program)
    looked = wait_until(lambda: facts(rig, program)["looked_at"], 30, "the first look at the tables")
    wait_until(lambda: facts(rig, program)["looked_at"] > looked, 30, "the tables are looked at")
    rig.database.execute(
        "begin; drop table items; create table items (id int primary key, label text); commit",
        "insert into items values (3, 'second life')",
    )
    resumed(rig, program)
    assert program.terminate() == 0

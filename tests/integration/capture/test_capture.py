"""The capture process as it is run: from an empty log to a stream, and what it says of itself."""

import stat
from pathlib import Path

from tests.fix_capture import Rig
from tests.fix_processes import wait_until

ITEMS = "create table items (id int primary key, label text)"
MANY_TYPES = """
create type mood as enum ('good', 'bad');
create domain positive as int check (value > 0);
create table many (
  id bigint primary key, small smallint, flag boolean, n numeric, m numeric(10,2), r real, d double precision,
  c char(5), v varchar(20), t text, b bytea, j json, k jsonb, da date, ti time, tz timetz, ts timestamp,
  tt timestamptz(3), i interval, u uuid, ip inet, net cidr, bits bit(8), vb bit varying(10), money money,
  arr int[], texts text[], range int4range, mood mood, moods mood[], size positive, p point, x xml, o oid, name name
)"""


def test_snapshot_and_stream_of_a_fresh_pipeline_meet_without_a_gap(rig: Rig) -> None:
    rig.capture_tables(ITEMS, "insert into items select g, 'old' from generate_series(1, 5000) g", snapshot="initial")
    program = rig.start()
    number = 10_000
    while rig.status().get("state") != "streaming":
        assert program.running(), program.said()
        rig.database.execute(
            f"insert into items values ({number}, 'meanwhile')", "update items set label = 'n' where id = 7"
        )
        number += 1
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal()
    reads = [row for row in rig.rows() if row["op"] == "r"]
    assert len(reads) >= 5000
    assert {row["version"] for row in reads} == {min(row["version"] for row in rig.rows())}


def test_a_kill_while_the_slot_is_new_leaves_nothing_that_the_next_start_cannot_use(rig: Rig) -> None:
    rig.capture_tables(ITEMS, "insert into items values (1, 'a')", snapshot="initial")
    program = rig.start(fail="snapshot.before_append:kill")
    assert program.wait(60) < 0
    rig.database.execute("insert into items values (2, 'b')", "delete from items where id = 1")
    program = rig.start()
    rig.wait_caught_up(program)
    wait_until(lambda: list(rig.folded("public.items")) == ['{"id":2}'], 60, "what the snapshot left out")
    assert program.terminate() == 0
    rig.assert_equal()


def test_the_status_says_what_people_and_machines_need(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute("insert into items values (1, 'MARKER'), (2, 'MARKER')", "delete from items where id = 1")
    wait_until(lambda: rig.status().get("changes_total") == 3, 30, "the changes to be counted")
    facts = rig.status()
    assert facts["state"] == "streaming" and facts["pid"] == program.pid
    assert facts["changes"] == {"public.items": {"c": 2, "d": 1}}
    assert facts["durable"] <= facts["watermark"]
    assert facts["slot_wal_status"] == "reserved" and facts["slot_retained_bytes"] >= 0
    assert facts["last_commit_at"]
    assert program.terminate() == 0
    assert rig.status()["state"] == "stopped"
    assert "MARKER" not in program.said() + str(facts)


def test_every_type_has_the_same_schema_in_snapshot_and_stream(rig: Rig) -> None:
    """Under the policy `exception` the smallest difference would stop the stream."""
    rig.capture_tables(MANY_TYPES, "insert into many (id, mood) values (1, 'good')", snapshot="initial")
    rig.source["schema_policy"] = "exception"
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute(
        "insert into many (id, arr, m) values (2, '{1,2}', 1.50)", "update many set small = 5 where id = 1"
    )
    rig.wait_caught_up(program)
    assert {row["schema_id"] for row in rig.rows("public.many")} == {1}
    rig.database.execute("alter table many add column extra int", "insert into many (id) values (3)")
    assert program.wait(30) == 1
    assert "extra was added" in rig.status()["error"]["message"]
    assert len(rig.rows("public.many")) == 3


def test_what_lies_in_the_state_folder_is_for_us_alone(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    program = rig.start()
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    open_to_others = [
        str(path)
        for path in [rig.state, *rig.state.rglob("*")]
        if stat.S_IMODE(path.lstat().st_mode) & 0o077 and not path.is_symlink()
    ]
    assert open_to_others == []


def test_the_password_is_nowhere_to_be_seen(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    program = rig.start(env={"PYTHONFAULTHANDLER": "1"})
    rig.wait_caught_up(program)
    secret = rig.source["password"]
    assert secret not in Path(f"/proc/{program.pid}/cmdline").read_text()
    ended = "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s and active"
    wait_until(lambda: rig.ask(ended, rig.source["slot"]), 30, "a sender to end")
    wait_until(lambda: rig.status().get("reconnects"), 30, "the reconnect")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    assert secret not in program.said()
    assert all(secret.encode() not in path.read_bytes() for path in rig.state.rglob("*") if path.is_file())


def test_a_column_that_the_policy_ignores_is_in_no_image(rig: Rig) -> None:
    rig.capture_tables("create table items (id int primary key, label text)")
    rig.source["schema_policy"] = "ignore"
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute(
        "insert into items values (1, 'one')",
        "alter table items add column extra text default 'more'",
        "insert into items values (2, 'two', 'most')",
        "alter table items drop column label",
        "insert into items values (3, 'most')",
    )
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    assert [row["after"] for row in rig.rows("public.items")] == [
        '{"id":1,"label":"one"}',
        '{"id":2,"label":"two"}',
        '{"id":3}',
    ]

"""Tables that come, go and are made again while capture runs: the same process, the same stream, nothing missed."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.fix_capture import Rig
from tests.fix_processes import Program, wait_until
from tests.scenes.backfill import FILL, ITEMS, own, writers

MORE = (
    "create table more (id int primary key, v text)",
    "insert into more select g, 'before' from generate_series(1, 300) g",
)


@pytest.fixture
def running(rig: Rig) -> Iterator[tuple[Rig, Program]]:
    """A capture process that streams one table."""
    rig.capture_tables(ITEMS, FILL, snapshot="initial", heartbeat_seconds=0.5)
    program = rig.start()
    rig.wait_caught_up(program)
    yield rig, program
    program.kill()


def name_tables(rig: Rig, program: Program, *tables: str | dict[str, Any]) -> None:
    """Write the pipeline file anew and say so."""
    rig.source["tables"] = [{"name": item, "snapshot": "initial"} if isinstance(item, str) else item for item in tables]
    sections = {"state": str(rig.state), "source": rig.source}
    (rig.state.parent / "millrace.yaml").write_text(yaml.safe_dump(sections))
    program.send(signal.SIGHUP)


def facts(rig: Rig, program: Program) -> dict[str, Any]:
    assert program.running(), program.said()[-3000:]
    found = rig.status()
    return found if found.get("pid") == program.pid else {}


def job(rig: Rig, program: Program, table: str) -> dict[str, Any]:
    listed = facts(rig, program).get("backfills", [])
    return next((dict(item) for item in listed if item["id"] == own(table)), {})


def backfilled(rig: Rig, program: Program, table: str) -> None:
    wait_until(lambda: job(rig, program, table).get("state") == "done", 60, f"the backfill of {table}")


def begins_again(rig: Rig, program: Program, table: str) -> None:
    wait_until(lambda: any(row["op"] == "t" for row in rig.rows(table)), 60, f"the log drops what {table} held")
    backfilled(rig, program, table)


def test_a_table_added_while_capture_runs_is_complete_and_nothing_is_restarted(running: tuple[Rig, Program]) -> None:
    """Scenario 18: rows before the add, rows of a transaction open across it, rows after it, with writers beside."""
    rig, program = running
    rig.database.execute(*MORE)
    with writers(rig, 2, keys=520), rig.database.connect(autocommit=False) as straddling:
        straddling.execute("insert into more values (1000, 'open across the add')")
        straddling.execute("update more set v = 'open across the add' where id = 7")
        name_tables(rig, program, "public.items", "public.more")
        wait_until(lambda: "public.more" in facts(rig, program).get("captured", ()), 30, "the table is followed")
        rig.database.execute("insert into more values (2000, 'after')", "delete from more where id = 8")
        straddling.commit()
        backfilled(rig, program, "public.more")
    rig.wait_caught_up(program)
    assert facts(rig, program)["tables_outcome"]["ok"]
    assert program.terminate() == 0
    rig.assert_equal("public.items", "public.more")
    rig.assert_once_in_order()
    assert len(rig.folded("public.more")) == 301


def test_a_table_that_cannot_be_captured_is_named_and_the_others_go_on(running: tuple[Rig, Program]) -> None:
    rig, program = running
    rig.database.execute("create table keyless (v text)")
    name_tables(rig, program, "public.items", "public.keyless")
    wait_until(lambda: facts(rig, program).get("tables_outcome"), 30, "the refusal")
    said = facts(rig, program)["tables_outcome"]
    assert not said["ok"] and "public.keyless" in said["message"] and said["remedy"]
    assert facts(rig, program)["captured"] == ["public.items"]
    rig.database.execute("update items set label = 'goes on' where id = 1", "insert into keyless values ('unharmed')")
    rig.wait_caught_up(program)
    rig.source["tables"].pop()
    assert program.terminate() == 0
    rig.assert_equal()


def test_what_only_a_restart_can_change_is_refused(running: tuple[Rig, Program]) -> None:
    rig, program = running
    name_tables(rig, program, {"name": "public.items", "snapshot": "initial", "mask": {"label": "mask"}})
    wait_until(lambda: facts(rig, program).get("tables_outcome"), 30, "the refusal")
    assert "source.tables: public.items cannot be changed" in facts(rig, program)["tables_outcome"]["message"]
    assert program.terminate() == 0


def test_the_mask_of_an_added_table_holds_from_its_first_row(running: tuple[Rig, Program]) -> None:
    rig, program = running
    rig.database.execute(*MORE)
    added = {"name": "public.more", "snapshot": "initial", "mask": {"v": "mask"}}
    name_tables(rig, program, {"name": "public.items", "snapshot": "initial"}, added)
    wait_until(lambda: "public.more" in facts(rig, program).get("captured", ()), 30, "the table is followed")
    rig.database.execute("insert into more values (2000, 'SECRET')", "update more set v = 'SECRET' where id = 9")
    backfilled(rig, program, "public.more")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    assert {json.loads(row["after"])["v"] for row in rig.rows("public.more")} == {"***"}


@pytest.mark.parametrize("mode", ["initial", "never"])
def test_a_table_dropped_and_made_again_begins_again_with_the_rows_it_has(
    running: tuple[Rig, Program], mode: str
) -> None:
    """Its first life leaves nothing behind, whether it is made again at once or later."""
    rig, program = running
    rig.database.execute(*MORE)
    added = {"name": "public.more", "snapshot": mode}
    name_tables(rig, program, {"name": "public.items", "snapshot": "initial"}, added)
    wait_until(lambda: "public.more" in facts(rig, program).get("captured", ()), 30, "the table is followed")
    rig.database.execute("update more set v = 'last words'")
    if mode == "initial":
        backfilled(rig, program, "public.more")
    rig.wait_caught_up(program)
    assert len(rig.folded("public.more")) == 300
    rig.database.execute("drop table more")
    wait_until(lambda: "public.more was dropped" in program.said(), 30, "the drop is noticed")
    rig.database.execute(
        "create table more (id int primary key, w int)", "insert into more select g, g from generate_series(250, 400) g"
    )
    begins_again(rig, program, "public.more")
    rig.database.execute("insert into more values (500, 1)", "update more set w = -1 where id = 300")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    if mode == "initial":
        rig.assert_equal()
    else:
        assert set(rig.folded("public.more")) == {'{"id":300}', '{"id":500}'}


def test_a_table_that_comes_back_is_read_again_and_rows_deleted_meanwhile_are_gone(
    running: tuple[Rig, Program],
) -> None:
    rig, program = running
    rig.database.execute(*MORE)
    name_tables(rig, program, "public.items", "public.more")
    backfilled(rig, program, "public.more")
    name_tables(rig, program, "public.items")
    wait_until(lambda: facts(rig, program).get("captured") == ["public.items"], 30, "the table is given up")
    rig.database.execute("delete from more where id < 100", "update more set v = 'unseen' where id > 200")
    name_tables(rig, program, "public.items", "public.more")
    wait_until(lambda: "public.more" in facts(rig, program).get("captured", ()), 30, "the table is back")
    rig.database.execute("update more set v = 'seen' where id = 150")
    begins_again(rig, program, "public.more")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal()


@pytest.mark.parametrize("point", ["tables.published:kill@2", "tables.noted:kill"], ids=["published", "noted"])
def test_a_kill_while_a_table_is_added_is_mended_by_the_next_start(running: tuple[Rig, Program], point: str) -> None:
    rig, program = running
    assert program.terminate() == 0
    program = rig.start(point)
    rig.wait_caught_up(program)
    rig.database.execute(*MORE)
    name_tables(rig, program, "public.items", "public.more")
    assert program.wait(60) == -signal.SIGKILL
    rig.database.execute("insert into more values (2000, 'between')")
    program = rig.start()
    backfilled(rig, program, "public.more")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal()

"""kill -9 in the middle of snapshots and chunks: the next start goes on, nothing is missing, nothing goes back."""

import json
import signal
from typing import Any

import pytest

from cdc.capture.source import slot
from cdc.model import parse_lsn
from snapshots.backfill.requests import control_message
from snapshots.backfill.signing_key import control_key
from snapshots.initial.snapshot import EXACT_MARK, STATE_MARK
from tests.fix_capture import Rig
from tests.fix_processes import Program, wait_until
from tests.scenes.backfill import SAY, marks

TABLES = ("a", "b", "c", "d")


def dies(program: Program) -> None:
    assert program.wait(60) == -signal.SIGKILL, program.said()[-3000:]


def backfills(rig: Rig, program: Program) -> list[dict[str, Any]]:
    assert program.running(), program.said()[-3000:]
    facts = rig.status()
    return list(facts.get("backfills", ())) if facts.get("pid") == program.pid else []


def finishes(rig: Rig, program: Program) -> None:
    """Wait until every backfill is done and the log has caught up, then stop tidily."""

    def done() -> bool:
        jobs = backfills(rig, program)
        return bool(jobs) and all(job["state"] == "done" for job in jobs)

    wait_until(done, 90, "every backfill is done")
    rig.wait_caught_up(program)
    assert program.terminate() == 0


@pytest.fixture
def four_tables(rig: Rig) -> Rig:
    statements = [f"create table {name} (id int primary key, v text)" for name in TABLES]
    statements += [f"insert into {name} select g, '{name}' || g from generate_series(1, 200) g" for name in TABLES]
    rig.capture_tables(*statements, snapshot="initial", snapshot_workers=1)
    return rig


@pytest.mark.parametrize("point", ["snapshot.before_append", "snapshot.after_append"])
def test_a_snapshot_cut_short_is_finished_in_chunks_beside_the_stream(four_tables: Rig, point: str) -> None:
    rig = four_tables
    dies(rig.start(f"{point}:kill@3"))
    read = {row["table"] for row in rig.rows()}
    assert 0 < len(read) < len(TABLES)
    rig.database.execute(
        *(f"update {name} set v = 'changed' where id % 3 = 0" for name in TABLES),
        *(f"delete from {name} where id % 7 = 0" for name in TABLES),
    )
    finishes(rig, rig.start())
    rig.assert_equal()
    kept = marks(rig)
    assert json.loads(kept[STATE_MARK])["state"] == "done"
    chunks = [row["commit_lsn"] for row in rig.rows() if row["op"] == "r" and row["table"] not in read]
    assert parse_lsn(kept[EXACT_MARK]) > max(chunks)


def test_what_a_snapshot_cut_short_has_left_may_be_cancelled_and_nobody_waits_for_it(four_tables: Rig) -> None:
    rig = four_tables
    dies(rig.start("snapshot.after_append:kill@3"))
    with rig.database.connect(autocommit=False) as locker:
        locker.execute(f"lock table {', '.join(TABLES)} in access exclusive mode")
        program = rig.start()
        wait_until(lambda: backfills(rig, program), 60, "what is left is under way")
        assert rig.status()["history_exact_from"] == ""
        rig.ask(SAY, control_message("cancel", "all", control_key(rig.state)))
        wait_until(lambda: rig.status()["history_exact_from"], 60, "the rest is given up")
        assert {job["state"] for job in backfills(rig, program)} == {"cancelled"}
    assert program.terminate() == 0


def test_a_crash_behind_the_last_rows_leaves_an_exact_snapshot(four_tables: Rig) -> None:
    rig = four_tables
    dies(rig.start(f"snapshot.after_append:kill@{len(TABLES)}"))
    assert marks(rig)[EXACT_MARK] == ""
    program = rig.start()
    rig.wait_caught_up(program)
    assert backfills(rig, program) == []
    assert program.terminate() == 0
    kept = marks(rig)
    assert parse_lsn(kept[EXACT_MARK]) == json.loads(kept[slot.MARK])["consistent_point"]
    rig.assert_equal()
    assert len(rig.rows()) == 200 * len(TABLES)


def test_a_backfill_killed_in_every_chunk_is_resumed_and_complete(rig: Rig) -> None:
    """Scenario 48: at every point of a chunk, again and again, with changes between."""
    rig.capture_tables(
        "create table items (id int primary key, v text)",
        "insert into items select g, 'old' from generate_series(1, 14000) g",
        snapshot="incremental",
    )
    points = ["backfill.after_low", "backfill.before_high", "backfill.after_high", "log.before_rename"]
    for turn, point in enumerate(points):
        dies(rig.start(f"{point}:kill@{3 if point.startswith('log') else 2}"))
        rig.database.execute(
            f"update items set v = 'turn {turn}' where id % 10 = {turn}", f"delete from items where id % 97 = {turn}"
        )
    finishes(rig, rig.start())
    rig.assert_equal()
    reads = [row["key"] for row in rig.rows() if row["op"] == "r"]
    assert len(reads) < 2 * 14000

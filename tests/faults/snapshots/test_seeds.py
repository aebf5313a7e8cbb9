"""Every mode of snapshot, killed at every point, while writers never stop: the log ends equal to the source."""

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from snapshots.backfill.requests import Request, backfill_message
from tests.fix_capture import Rig
from tests.fix_processes import Program, wait_until
from tests.scenes.backfill import SAY, replayed, writers
from tests.scenes.seeds import seeds

ITEMS = "create table items (id int primary key, label text, amount numeric, big text) partition by hash (id)"
LEAVES = [f"create table items_{at} partition of items for values with (modulus 4, remainder {at})" for at in range(4)]
EXTERNAL = [f"alter table items_{at} alter big set storage external" for at in range(4)]
FILL = "insert into items select g, 'old', g / 7.0, repeat('x', 50) from generate_series(1, 6500) g"
POINTS = {
    "initial": ("snapshot.before_append", "snapshot.after_append", "log.before_rename", "backfill.before_high"),
    "incremental": ("backfill.after_low", "backfill.before_high", "backfill.after_high", "log.before_rename"),
    "never": ("backfill.after_low", "backfill.after_high", "log.before_rename", "log.after_append"),
}
CASES = [
    pytest.param(mode, point, id=f"{mode}-{point}", marks=() if point == "log.before_rename" else pytest.mark.soak)
    for mode, points in POINTS.items()
    for point in points
]
"""In CI each mode is killed at the point where the most is at stake: its rows are written, and nobody sees them yet."""


def ends_or_settles(rig: Rig, program: Program) -> None:
    """Wait until the process was killed at its point, or has come past all its work without meeting it."""
    wait_until(lambda: not program.running() or settled(rig, program), 120, "a kill, or the end of every backfill")
    if program.running():
        program.kill()
    assert program.wait() == -signal.SIGKILL, program.said()[-3000:]


def settled(rig: Rig, program: Program) -> bool:
    facts = rig.status()
    if facts.get("pid") != program.pid or facts.get("state") != "streaming":
        return False
    return all(job["state"] == "done" for job in facts.get("backfills", ()))


def ask_again(rig: Rig) -> None:
    """By SQL, as somebody with only database access would: no signature."""
    rig.ask(SAY, backfill_message(Request.of_facts({"table": "public.items"}), b""))


@contextlib.contextmanager
def scene(rig: Rig, mode: str, seed: int) -> Iterator[random.Random]:
    """A partitioned table, and writers on a few of its rows from before the start to the end.

    Where nothing is read, a row that was last written before the slot is in no log: there the slot comes first.
    """
    rng = random.Random(seed)
    rig.capture_tables(ITEMS, *LEAVES, *EXTERNAL, FILL, snapshot=mode, snapshot_workers=rng.choice([1, 2]))
    if mode == "never":
        ends_or_settles(rig, rig.start())
    with writers(rig, 2, seed=seed, keys=80):
        yield rng


@pytest.mark.parametrize("seed", seeds(1, 25))
@pytest.mark.parametrize(("mode", "point"), CASES)
def test_any_mode_killed_at_any_point_ends_equal_while_writers_go_on(
    rig: Rig, mode: str, point: str, seed: int
) -> None:
    with scene(rig, mode, seed) as rng:
        ends_or_settles(rig, rig.start(f"{point}:kill@{rng.randint(1, 4)}"))
        program = rig.start(f"{point}:kill@{rng.randint(1, 3)}") if rng.random() < 0.5 else rig.start()
        wait_until(lambda: not program.running() or rig.status().get("state") == "streaming", 60, "the second start")
        ask_again(rig)
        ends_or_settles(rig, program)
        program = rig.start()
        wait_until(lambda: settled(rig, program), 120, "every backfill")
    rig.wait_caught_up(program)
    wait_until(lambda: settled(rig, program), 120, "every backfill")
    assert program.terminate() == 0
    assert_equal(rig, mode)
    rig.assert_once_in_order()


def assert_equal(rig: Rig, mode: str) -> None:
    """By version and by order. Where nothing was ever read, what changed is there as it is."""
    with rig.database.connect() as connection:
        rows = connection.execute("select to_jsonb(t) from items t").fetchall()
    wanted: dict[int, dict[str, Any]] = {row["id"]: row for (row,) in rows}
    backfilled = any(json.loads(row["key"])["id"] > 80 for row in rig.rows("public.items") if row["op"] == "r")
    assert backfilled or mode == "never"
    for guarded in (True, False):
        found = {row["id"]: row for row in replayed(rig, guarded).values()}
        if backfilled:
            assert found == wanted, f"guarded: {guarded}"
        else:
            changed = {number: row for number, row in wanted.items() if row["label"] != "old"}
            assert {number: row for number, row in found.items() if row["label"] != "old"} == changed

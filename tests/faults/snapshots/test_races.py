"""Commits that are in the WAL, and in the log, but not yet visible: held by a standby that never answers."""

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest

from snapshots.backfill import pace
from snapshots.backfill.requests import Request
from tests.fix_capture import MakeRig, Rig
from tests.fix_processes import wait_until
from tests.fix_servers import PostgresServer
from tests.scenes.backfill import FILL, ITEM, ITEMS, assert_right, backfilling, writers


def hold(server: PostgresServer) -> None:
    """From now on commits wait for a standby that does not exist."""
    server.execute("alter system set synchronous_standby_names = 'nobody'")
    server.execute("select pg_reload_conf()")


def release(server: PostgresServer) -> None:
    server.execute("alter system reset synchronous_standby_names")
    server.execute("select pg_reload_conf()")


@pytest.fixture
def held_rig(private_rig: MakeRig) -> Iterator[Rig]:
    rig = private_rig()
    rig.capture_tables(ITEMS, FILL, snapshot="initial")
    rig.begin()
    yield rig
    release(rig.database.server)


def test_a_chunk_waits_for_a_commit_that_the_log_has_and_it_cannot_see(held_rig: Rig) -> None:
    rig, server = held_rig, held_rig.database.server
    with backfilling(rig) as scene:
        hold(server)
        writer = threading.Thread(target=rig.database.execute, args=("update items set label = 'held' where id = 7",))
        writer.start()
        wait_until(lambda: any("held" in (row["after"] or "") for row in rig.rows()), what="the log has the commit")
        assert rig.ask("select label from items where id = 7") == "l7"
        asked = scene.ask(Request(ITEM))
        wait_until(lambda: int(scene.job(asked).get("rereads", 0)) > 2, what="the chunk is read again")
        assert scene.job(asked)["rows"] == 0
        release(server)
        writer.join(30)
        scene.wait(asked)
        scene.catch_up()
    assert_right(rig)


@contextlib.contextmanager
def flapping(server: PostgresServer) -> Iterator[None]:
    """Hold and release commits, again and again."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.1):
            hold(server)
            stop.wait(0.2)
            release(server)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        release(server)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousands_of_chunks_are_right_each_time_while_commits_are_held(
    held_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writers rest now and then, and each time the log is the source."""
    monkeypatch.setattr(pace, "_FIRST", 10)
    monkeypatch.setattr(pace, "_MOST", 20)
    wanted, chunks, rereads, seed = int(os.environ.get("CHUNKS", "3000")), 0, 0, 0
    while chunks < wanted:
        seed += 1
        with backfilling(held_rig) as scene:
            with writers(held_rig, 3, seed=seed), flapping(held_rig.database.server):
                for _ in range(8):
                    rereads += scene.wait(scene.ask(Request(ITEM)))["rereads"]
            scene.catch_up()
        assert_right(held_rig)
        chunks = len({row["commit_lsn"] for row in held_rig.rows() if row["op"] == "r"})
        print(f"{chunks} chunks, {rereads} read again, equal {seed} times", flush=True)
    assert rereads > wanted / 100


def test_live_changes_win_while_commits_are_held_and_released(held_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_FIRST", 20)
    monkeypatch.setattr(pace, "_MOST", 60)
    rereads = rounds = 0
    with backfilling(held_rig) as scene, writers(held_rig, 3, seed=4), flapping(held_rig.database.server):
        while rounds < 3 or (not rereads and rounds < 30):
            rereads += scene.wait(scene.ask(Request(ITEM)))["rereads"]
            rounds += 1
    with backfilling(held_rig) as scene:
        scene.catch_up()
    assert_right(held_rig)
    assert rereads > 0

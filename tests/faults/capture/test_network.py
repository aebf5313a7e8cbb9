"""The way to Postgres misbehaves, or somebody else is on it: found in bounded time, healed without loss."""

import signal
import threading
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

import cdc.log
from cdc.clock import SystemClock
from cdc.errors import SlotBusy
from cdc.model import LOG_SCHEMA, Entry
from tests.fix_capture import MakeRig, Rig
from tests.fix_processes import wait_until
from tests.fix_proxy import MakeProxy, Proxy

ITEMS = "create table items (id int primary key, label text)"


@pytest.fixture
def items(rig: Rig) -> Rig:
    """A captured table."""
    rig.capture_tables(ITEMS)
    rig.begin()
    return rig


@pytest.fixture
def way(items: Rig, proxy: MakeProxy) -> Proxy:
    """A proxy between the reader and its server."""
    made = proxy(items.source["port"])
    items.source["port"] = made.port
    return made


def test_a_black_hole_is_noticed_within_two_keepalives_and_left_behind(items: Rig, way: Proxy) -> None:
    items.source["heartbeat_seconds"] = 1.0
    with items.following() as following:
        items.database.execute("insert into items values (1, 'a')")
        following.reaches(items.now())
        way.stall()
        items.database.execute("insert into items values (2, 'b')")
        wait_until(lambda: following.status.state == "reconnecting", 2 * 1.0 + 1.5, "the silence to be noticed")
        way.reset()
        way.pass_on()
        following.reaches(items.now())
    items.assert_equal()


def test_our_own_dead_connection_does_not_hold_the_slot_until_the_server_notices(items: Rig, way: Proxy) -> None:
    """The server keeps a silent reader for a minute; we know that it was us, and end it."""
    with items.following() as following:
        items.database.execute("insert into items values (1, 'a')")
        following.reaches(items.now())
        active = "select active_pid from pg_replication_slots where slot_name = %s"
        old = items.ask(active, items.source["slot"])
        way.stall()
        wait_until(lambda: following.status.state == "reconnecting", 10, "the silence to be noticed")
        assert items.ask(active, items.source["slot"]) == old
        way.pass_on()
        items.database.execute("insert into items values (2, 'b')")
        following.reaches(items.now(), 20)
        assert items.ask(active, items.source["slot"]) != old
    items.assert_equal()


def test_a_way_back_that_is_deaf_is_noticed_too(items: Rig, way: Proxy) -> None:
    """Our words arrive, the server's do not: from our side the same silence."""
    with items.following() as following:
        items.database.execute("insert into items values (0, 'a')")
        following.reaches(items.now())
        way.one_way("up")
        wait_until(lambda: following.status.state == "reconnecting", 5, "the silence to be noticed")
        way.reset()
        way.pass_on()
        items.database.execute("insert into items values (1, 'a')")
        following.reaches(items.now())
    items.assert_equal()


def test_a_connection_that_flaps_makes_progress_at_a_bounded_rate(items: Rig, way: Proxy) -> None:
    with items.following() as following:
        for turn in range(6):
            items.database.execute(
                f"insert into items select g, 'x' from generate_series({turn * 100}, {turn * 100 + 99}) g"
            )
            following.reaches(items.now())
            way.reset()
        items.database.execute("insert into items values (-1, 'last')")
        following.reaches(items.now())
        assert following.status.reconnects >= 5
        assert way.connections < 60
    items.assert_equal()
    items.assert_once_in_order()


@pytest.mark.soak
def test_five_minutes_of_a_connection_reset_every_two_seconds_end_equal(items: Rig, way: Proxy) -> None:
    """Straight to the server goes the writer, through the proxy the reader."""
    deadline, turn = time.monotonic() + 300, 0
    with items.following() as following:
        while time.monotonic() < deadline:
            turn += 1
            items.database.execute(f"insert into items values ({turn}, 'x')", "update items set label = label || '.'")
            reached = following.status.watermark
            threading.Event().wait(2)
            way.reset()
            if turn % 10 == 0:
                wait_until(lambda: following.status.watermark > reached, 30, "progress")  # noqa: B023
        following.reaches(items.now())
        assert way.connections < 4 * turn
    items.assert_equal()
    items.assert_once_in_order()


def test_a_connection_cut_in_the_middle_of_a_transaction_brings_it_again_whole(items: Rig, way: Proxy) -> None:
    with items.following() as following:
        items.database.execute("insert into items values (0, 'a')")
        following.reaches(items.now())
        way.cut_after(100_000, "down")
        items.database.execute("insert into items select g, repeat('x', 50) from generate_series(1, 5000) g")
        following.reaches(items.now())
        assert following.status.reconnects
    items.assert_equal()
    items.assert_once_in_order()


def test_a_second_reader_waits_and_then_says_who_has_the_slot(items: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdc.capture.replication.loop._BUSY_SECONDS", 2.0)
    items.source["heartbeat_seconds"] = 60.0
    second = _second(items)
    with items.following() as first:
        wait_until(lambda: first.status.state == "streaming", 30)
        with second.following() as waiting:
            assert isinstance(waiting.error(60), SlotBusy)
        items.database.execute("insert into items values (1, 'a')")
        first.reaches(items.now())


def test_a_second_reader_takes_over_once_the_first_is_gone(items: Rig) -> None:
    second = _second(items)
    with items.following() as first:
        wait_until(lambda: first.status.state == "streaming", 30)
        with second.following() as waiting:
            wait_until(lambda: waiting.status.reconnects, 30, "the second to find the slot taken")
            first.stop.set()
            first.thread.join(30)
            items.database.execute("insert into items values (1, 'a')")
            waiting.reaches(items.now())
    second.assert_equal()


def _second(first: Rig) -> Rig:
    """Another pipeline whose log knows the same slot."""
    second = Rig(first.database, first.state.parent / "other", first.run_program)
    second.source = first.source
    with closing(cdc.log.open_writer(first.settings)) as log:
        known = log.progress()
    with closing(cdc.log.open_writer(second.settings)) as log:
        log.append(Entry(LOG_SCHEMA.empty_table(), known.end, known.marks))
    return second


def test_a_zombie_that_comes_back_cannot_write_any_more(rig: Rig) -> None:
    """The old process is stopped, the lock's owner with it; a new one must wait for it rather than run beside it."""
    rig.capture_tables(ITEMS)
    rig.begin()
    old = rig.start()
    rig.wait_caught_up(old)
    old.pause()
    rig.database.execute("insert into items values (1, 'a')")
    new = rig.start()
    assert new.wait(60) != 0, "two writers of one log"
    old.unpause()
    rig.wait_caught_up(old)
    assert old.terminate() == 0
    rig.assert_equal()
    rig.assert_once_in_order()


def test_a_paused_process_that_lost_its_connection_reads_again_what_it_missed(private_rig: MakeRig) -> None:
    rig = private_rig({"wal_sender_timeout": "1s"})
    rig.capture_tables(ITEMS)
    rig.begin()
    program = rig.start()
    rig.wait_caught_up(program)
    program.pause()
    rig.database.execute("insert into items select g, 'x' from generate_series(1, 500) g")
    active = "select active from pg_replication_slots where slot_name = %s"
    wait_until(lambda: not rig.ask(active, rig.source["slot"]), 30, "the server to give the reader up")
    program.send(signal.SIGCONT)
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal()
    rig.assert_once_in_order()


class _Jumping(SystemClock):
    """A wall clock that jumps by hours in both directions."""

    turns = 0

    def now(self) -> datetime:
        self.turns += 1
        return datetime.now(UTC) + timedelta(hours=(-1) ** self.turns)


def test_a_clock_that_jumps_changes_nothing(items: Rig) -> None:
    with items.following(clock=_Jumping()) as following:
        items.database.execute(
            "insert into items select g, 'x' from generate_series(1, 500) g", "delete from items where id < 50"
        )
        following.reaches(items.now())
    items.assert_equal()

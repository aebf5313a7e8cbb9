"""kill -9 of the capture process at its named points, and of Postgres: nothing lost, nothing twice, order kept.

The log's own guard makes "sent again" invisible: what Postgres repeats after a crash is appended once.
"""

import signal
import threading
from contextlib import suppress

import psycopg
import pytest

from tests.fix_capture import MakeRig, Rig
from tests.fix_processes import Program, wait_until
from tests.fix_servers import Database

ITEMS = "create table items (id int primary key, label text)"
POINTS = [
    "capture.before_append",
    "log.before_rename",
    "log.after_append",
    "ack.before_confirm",
    "capture.after_confirm",
]


def _history(rig: Rig, first: int) -> None:
    """A COPY whose rows share an LSN, updates, deletes, a rollback, and two transactions back to back."""
    with rig.database.connect() as connection:
        with connection.cursor().copy("copy items from stdin") as copy:
            for number in range(first, first + 200):
                copy.write_row((number, "copied"))
        connection.execute("update items set label = 'changed' where id %% 3 = 0 and id >= %s", (first,))
        connection.execute("delete from items where id %% 5 = 0 and id >= %s", (first,))
        with connection.transaction(force_rollback=True):
            connection.execute("insert into items values (-1, 'rolled back')")
        connection.execute("insert into items values (%s, 'adjacent')", (first + 1000,))
        connection.execute("insert into items values (%s, 'adjacent')", (first + 1001,))


def _died(program: Program) -> bool:
    return not program.running()


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_this_point_loses_nothing_and_doubles_nothing(rig: Rig, point: str) -> None:
    rig.capture_tables(ITEMS)
    rig.begin()
    for count in (1, 3):
        program = rig.start(fail=f"{point}:kill@{count}")
        _history(rig, 10_000 * count)
        for turn in range(10):
            rig.database.execute(f"insert into items values ({-10 * count - turn}, 'one more')")
            wanted = rig.now()
            wait_until(lambda: _died(program) or rig.confirmed() >= wanted, 30, f"the kill at {point}")  # noqa: B023
            if _died(program):
                break
        assert program.wait() == -signal.SIGKILL
    program = rig.start()
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal()
    rig.assert_once_in_order()


def test_a_restart_exactly_at_a_commit_takes_the_next_transaction_whole(rig: Rig) -> None:
    """Commit and the next Begin share an LSN: `<=` on it would drop a real row."""
    rig.capture_tables(ITEMS)
    rig.begin()
    with rig.database.connect() as connection:
        for number in range(20):
            with connection.transaction():
                connection.execute("insert into items values (%s, 'a'), (%s, 'b')", (2 * number, 2 * number + 1))
    for _ in range(3):
        # Dies after one entry more each time: the log ends at a commit, and reading goes on right there.
        program = rig.start(fail="capture.after_confirm:kill@1")
        rig.database.execute("update items set label = label || '.' where id = 7")
        wait_until(lambda: _died(program), 30, "the kill")  # noqa: B023
    with rig.following() as following:
        following.reaches(rig.now())
    rig.assert_equal()
    rig.assert_once_in_order()


@pytest.mark.parametrize("moments", [3, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_sigterm_at_any_moment_ends_with_zero_and_loses_nothing(rig: Rig, moments: int) -> None:
    rig.capture_tables(ITEMS)
    rig.begin()
    done = threading.Event()

    def write() -> None:
        with rig.database.connect() as connection:
            number = 0
            while not done.is_set():
                connection.execute("insert into items values (%s, 'x')", (number,))
                number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for turn in range(moments):
            program = rig.start()
            wait_until(lambda: rig.status().get("pid") == program.pid or _died(program), 30)  # noqa: B023
            if turn % 2:
                wait_until(lambda: rig.status().get("changes_total", 0) or _died(program), 30)  # noqa: B023
            assert program.terminate() == 0, program.said()
    finally:
        done.set()
        writer.join()
    with rig.following() as following:
        following.reaches(rig.now())
    rig.assert_equal()
    rig.assert_once_in_order()


@pytest.mark.parametrize("restarts", [5, pytest.param(20, marks=pytest.mark.soak)])
def test_a_long_transaction_that_straddles_restarts_arrives_once(rig: Rig, restarts: int) -> None:
    rig.capture_tables(ITEMS)
    rig.begin()
    with rig.database.connect(autocommit=False) as long:
        for turn in range(restarts):
            long.execute("insert into items values (%s, 'long')", (turn,))
            rig.database.execute(f"insert into items values ({100 + turn}, 'beside')")
            with rig.following() as following:
                following.reaches(rig.now())
            long.execute("update items set label = label || '.' where id < 100")
        long.commit()
    with rig.following() as following:
        following.reaches(rig.now())
    rig.assert_equal()
    rig.assert_once_in_order()


def _write_until(done: threading.Event, database: Database) -> None:
    """A writer that bears the crashes of its server: what is committed counts, told or not."""
    number = 0
    while not done.is_set():
        with suppress(psycopg.Error), database.connect() as connection:
            while not done.is_set():
                number += 1
                with connection.transaction():
                    connection.execute("insert into items values (%s, 'new') on conflict do nothing", (number,))
                    connection.execute("update items set label = label || '.' where id = %s", (number - 7,))
                    connection.execute("delete from items where id = %s and id %% 3 = 0", (number - 20,))


@pytest.mark.parametrize("crashes", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_crashes_of_postgres_under_load_that_take_back_the_slots_position_double_nothing(
    private_rig: MakeRig, crashes: int
) -> None:
    rig = private_rig({"checkpoint_timeout": "1h"})
    server = rig.database.server
    rig.capture_tables(ITEMS)
    rig.begin()
    done, taken_back = threading.Event(), 0
    writer = threading.Thread(target=_write_until, args=(done, rig.database))
    writer.start()
    try:
        with rig.following() as following:
            for _ in range(crashes):
                seen = rig.confirmed()
                before = wait_until(lambda: rig.confirmed() > seen and rig.confirmed(), 60, "progress")  # noqa: B023
                server.stop("immediate")
                server.start()
                taken_back += rig.confirmed() < before
            done.set()
            writer.join()
            following.reaches(rig.now())
    finally:
        done.set()
        writer.join()
    assert taken_back, "the crashes must have taken the position back for this test to say anything"
    assert following.status.reconnects >= crashes
    rig.assert_equal()
    rig.assert_once_in_order()


def test_a_fast_shutdown_of_postgres_is_not_held_up_by_us(private_rig: MakeRig) -> None:
    rig = private_rig()
    server = rig.database.server
    rig.capture_tables(ITEMS)
    rig.begin()
    with rig.following() as following:
        rig.database.execute("insert into items values (1, 'a')")
        following.reaches(rig.now())
        server.stop("fast")  # fails the test itself if the server does not end
        server.start()
        rig.database.execute("insert into items values (2, 'b')")
        following.reaches(rig.now())
    rig.assert_equal()

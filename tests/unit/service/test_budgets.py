"""The budgets of disk and memory: what is judged, and what happens then."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdc.capture.transactions.spill import SpillFolder
from cdc.config.settings import BudgetSettings
from cdc.errors import LogFull
from cdc.log.guarded import WaitingLog
from cdc.model import Entry, Lsn
from cdc.service.daemon.budgets import DiskBudget, MemoryBudget, folder_bytes, resident_bytes
from cdc.service.daemon.supervisor import ChildProcess, Supervisor
from tests.fix_processes import wait_until
from tests.properties.test_assembly import _table as rows_of
from tests.unit.capture.test_append_queue import Memory

MB = 2**20


def test_there_is_room_where_there_is_room(tmp_path: Path) -> None:
    DiskBudget(tmp_path, BudgetSettings(free_mb=1)).check()
    assert DiskBudget(tmp_path, BudgetSettings(free_mb=1)).measure().free_bytes > MB


def test_too_little_free_space_is_a_full_log(tmp_path: Path) -> None:
    with pytest.raises(LogFull, match=r"less than budgets\.free_mb"):
        DiskBudget(tmp_path, BudgetSettings(free_mb=2**40)).check()


def test_too_large_a_state_folder_is_a_full_log_until_it_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.service.daemon.budgets._MEASURE_SECONDS", 0.0)
    ballast = tmp_path / "log" / "segment"
    ballast.parent.mkdir()
    ballast.write_bytes(bytes(3 * MB))
    budget = DiskBudget(tmp_path, BudgetSettings(free_mb=0, state_gb=2 / 1024))
    with pytest.raises(LogFull, match=r"more than budgets\.state_gb"):
        budget.check()
    ballast.write_bytes(bytes(MB))
    budget.check()


def test_large_transactions_in_files_without_a_name_count_against_the_budget(tmp_path: Path) -> None:
    scratch = SpillFolder(tmp_path / "scratch")
    budget = DiskBudget(tmp_path, BudgetSettings(free_mb=0, state_gb=1e-6), lambda: scratch.size)
    scratch.check = budget.check
    large = scratch.open()
    large.write(rows_of([(1, number) for number in range(1000)]))
    assert folder_bytes(tmp_path) == 0 and scratch.size > 1500
    with pytest.raises(LogFull, match=r"more than budgets\.state_gb"):
        large.write(rows_of([(1, 1001)]))
    with pytest.raises(LogFull):
        scratch.open()
    large.discard()
    scratch.open().discard()


def test_a_snapshot_waits_for_room_and_goes_on() -> None:
    log, said = Memory(LogFull("no room"), LogFull("no room")), list[str]()
    waiting = WaitingLog(log, threading.Event(), said.append)
    waiting.append(Entry(rows_of([(1, 1)]), Lsn(1)))
    assert len(log.entries) == 1 and said == ["no room", "no room", ""]


def test_a_snapshot_that_waits_for_room_ends_when_everything_stops() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(LogFull):
        WaitingLog(Memory(LogFull("no room")), stop, lambda _: None).append(Entry(rows_of([(1, 1)]), Lsn(1)))


def test_one_look_over_the_limit_is_not_enough_and_three_are() -> None:
    budget = MemoryBudget({"capture": 100})
    assert [bool(budget.restart_reason("capture", size * MB)) for size in (101, 150, 99, 101, 101, 101, 101)] == [
        *[False] * 5,
        True,
        False,
    ]
    assert not any(budget.restart_reason("apply", 10**12) for _ in range(9))


def test_a_part_that_came_no_further_since_it_was_started_again_is_left_alone_and_named() -> None:
    budget = MemoryBudget({"capture": 100})

    def judged(progress: int, size: int = 101) -> list[bool]:
        return [bool(budget.restart_reason("capture", size * MB, progress)) for _ in range(4)]

    assert judged(7) == [False, False, True, False]
    assert not any(judged(7)) and "Raise budgets.capture_memory_mb" in budget.excess["capture"]
    assert not any(judged(7, 99)) and not budget.excess
    assert any(judged(8)), "it has come further, so a restart may help again"


def test_the_memory_of_a_part_counts_its_children() -> None:
    large = "b = b'x' * (60 << 20); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {large!r}])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        wait_until(lambda: resident_bytes(child.pid) > 60 * MB, 20)
    finally:
        child.communicate(b"\n")
    assert resident_bytes(child.pid) == 0
    assert resident_bytes(os.getpid()) > MB


@contextmanager
def supervised(code: str, grace: float) -> Iterator[tuple[Supervisor, ChildProcess]]:
    """A part that runs this code, started and in the end stopped."""
    part = ChildProcess("part", [sys.executable, "-c", code])
    supervisor, stop = Supervisor([part], grace=grace), threading.Event()
    thread = threading.Thread(target=supervisor.run, args=(stop,))
    thread.start()
    try:
        wait_until(lambda: part.process is not None, 30)
        yield supervisor, part
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


def restarted(supervisor: Supervisor, part: ChildProcess, reason: str) -> None:
    first = part.process
    supervisor.restart("part", reason)
    wait_until(lambda: part.process is not None and part.process is not first, 30)


def test_a_part_is_started_again_at_once_with_the_reason_and_without_a_penalty() -> None:
    with supervised("import time; time.sleep(600)", grace=5) as (supervisor, part):
        restarted(supervisor, part, "it uses too much")
        assert part.facts()["last_exit"] == "it uses too much"
        assert (part.restarts, part.attempts.failures) == (1, 0)


def test_a_part_that_does_not_end_when_asked_is_killed_and_started_again() -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    with supervised(deaf, grace=1) as (supervisor, part):
        restarted(supervisor, part, "asked")

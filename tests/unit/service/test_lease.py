"""The lease: one holder, a fenced predecessor, and when a standby may take over."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.config.settings import SourceSettings
from cdc.errors import EnvironmentFault
from cdc.fence import guard, start
from cdc.service.standby.holder import RENEW_WITHIN, LeaseHolder
from cdc.service.standby.lease import Holder, Lease, LeaseTaken, Record, current, folder_of, here
from cdc.service.standby.waiting import EXPIRES_AFTER, SOURCE_LOST_FOR, acquire, reason_to_take, take_over
from cdc.service.state import status
from tests.fix_processes import wait_until

ELSEWHERE = Holder("other", "another machine", 1)


def _record(**facts: object) -> Record:
    return replace(Record(7, ELSEWHERE), **facts)  # type: ignore[arg-type]


def test_a_holder_that_was_replaced_cannot_renew_and_its_file_is_gone(tmp_path: Path) -> None:
    first = Lease.take(tmp_path, None)
    first.renew()
    second = Lease.take(tmp_path, current(tmp_path), "it was frozen")
    assert first.lost
    assert not second.lost
    with pytest.raises(LeaseTaken):
        first.renew()
    with pytest.raises(LeaseTaken):
        first.release()
    assert current(tmp_path) == second.record
    assert (second.record.number, second.record.takeovers) == (2, 1)


def test_of_many_that_take_a_lease_at_once_exactly_one_has_it(tmp_path: Path) -> None:
    before = Lease.take(tmp_path, None).record
    taken: list[Lease] = []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        with suppress(LeaseTaken):
            taken.append(Lease.take(tmp_path, before, "race"))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert current(tmp_path) == taken[0].record


def test_one_that_looked_too_early_does_not_get_a_number_that_was_passed_meanwhile(tmp_path: Path) -> None:
    seen = Lease.take(tmp_path, None).record
    Lease.take(tmp_path, current(tmp_path))
    third = Lease.take(tmp_path, current(tmp_path))
    with pytest.raises(LeaseTaken):
        Lease.take(tmp_path, seen)
    assert not third.lost
    assert [path.name for path in folder_of(tmp_path).iterdir()] == ["00000003"]


def test_a_number_is_not_used_again_after_a_tidy_end(tmp_path: Path) -> None:
    first = Lease.take(tmp_path, None)
    first.release()
    assert acquire(tmp_path).record.number == 2
    assert first.lost


@pytest.mark.parametrize(
    ("record", "unchanged", "source_answers", "takes"),
    [
        (None, 0.0, False, True),
        (_record(released=True), 0.0, False, True),
        (_record(), EXPIRES_AFTER - 0.1, True, False),
        (_record(), EXPIRES_AFTER + 0.1, False, True),
        (_record(source_lost=SOURCE_LOST_FOR + 0.1), 0.0, True, True),
        (_record(source_lost=SOURCE_LOST_FOR + 0.1), 0.0, False, False),
        (_record(source_lost=SOURCE_LOST_FOR - 0.1), 0.0, True, False),
    ],
)
def test_a_standby_takes_over_only_if(
    record: Record | None, unchanged: float, source_answers: bool, takes: bool
) -> None:
    assert (reason_to_take(record, unchanged, source_answers) is not None) == takes


def test_a_process_of_this_machine_that_has_ended_is_replaced_at_once(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    ended = replace(_record(), holder=replace(here(), pid=child.pid))
    wait_until(lambda: reason_to_take(ended, 0.0, False) is not None, 10)  # before anybody has waited for it
    child.wait()
    assert "has ended" in (reason_to_take(ended, 0.0, False) or "")
    assert reason_to_take(replace(ended, holder=replace(ended.holder, place="elsewhere")), 0.0, False) is None


def test_the_holder_gives_up_before_a_standby_may_take_over() -> None:
    assert RENEW_WITHIN < EXPIRES_AFTER - 1


def test_a_daemon_that_does_not_wait_is_refused_while_the_lease_is_renewed(tmp_path: Path) -> None:
    lease = Lease.take(tmp_path, None)
    lease.record = replace(lease.record, holder=ELSEWHERE)
    lease.renew()
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.1):
            lease.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(EnvironmentFault, match="pid 1 on other"):
        acquire(tmp_path)
    stop.set()
    thread.join()


def test_taking_over_frees_the_locks_that_a_frozen_process_keeps(tmp_path: Path) -> None:
    before = Lease.take(tmp_path, None).record
    for name in ("log/lock", "checkpoints/redis.lock", "log/00000001.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    take_over(tmp_path, before, "it was frozen")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["leases/00000002", "log/00000001.parquet"]


def test_the_holder_stops_the_daemon_when_its_lease_is_gone_and_leaves_the_new_one_alone(tmp_path: Path) -> None:
    lost = threading.Event()
    with LeaseHolder(Lease.take(tmp_path, None), tmp_path, SourceSettings(), lost.set) as holder:
        second = Lease.take(tmp_path, current(tmp_path), "test")
        assert lost.wait(30)
        assert holder.lost
    assert not second.lost
    assert current(tmp_path) == second.record


def test_a_renewal_under_way_does_not_undo_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, renewing, proceed = os.pwrite, threading.Event(), threading.Event()

    def slow(descriptor: int, content: bytes, offset: int) -> int:
        if threading.current_thread().name == "lease" and not renewing.is_set():
            renewing.set()
            assert proceed.wait(30)
        return write(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    holder = LeaseHolder(Lease.take(tmp_path, None), tmp_path, SourceSettings(), lambda: None)
    holder.__enter__()
    assert renewing.wait(30)
    ending = threading.Thread(target=holder.__exit__)
    ending.start()
    ending.join(0.2)  # long enough for a release that does not wait for the renewal
    proceed.set()
    ending.join(30)
    wait_until(lambda: all(thread.name != "lease" for thread in threading.enumerate()), 30, "the last renewal")
    assert getattr(current(tmp_path), "released", None) is True


def test_the_holder_stops_when_it_cannot_renew_only_if_a_standby_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_lease: Lease, _source_lost: float | None = None) -> None:
        raise OSError(5, "broken")

    lost = threading.Event()
    monkeypatch.setattr("cdc.service.standby.holder._TICK", 0.01)
    monkeypatch.setattr("cdc.service.standby.holder.RENEW_EVERY", 0.01)
    monkeypatch.setattr(Lease, "renew", broken)
    with LeaseHolder(Lease.take(tmp_path, None), tmp_path, SourceSettings(port=1), lost.set) as holder:
        assert not lost.wait(1.0)
        monkeypatch.setattr("cdc.service.standby.holder.RENEW_WITHIN", 1.0)

        def stopped() -> bool:
            status.publish(tmp_path, "standby-x", {})
            return lost.wait(0.05)

        wait_until(stopped, 30, "the holder to stop")
        assert "could not be renewed" in holder.reason


def test_a_loaded_part_that_ended_does_not_end_the_daemon_that_takes_over() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    start.start(writer)


def test_a_guarded_process_kills_itself_with_its_group_when_its_lease_is_gone(tmp_path: Path) -> None:
    lease = Lease.take(tmp_path, None)
    code = "from cdc.fence import guard; import time; guard.watch(); print('on', flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, guard.LEASE: str(lease.path)},
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"on\n"
    Lease.take(tmp_path, lease.record, "test")
    assert child.wait(30) == -signal.SIGKILL
    child.stdout.close()

"""Parts are started again where that can help, and health never lies by silence."""

import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdc.errors import EnvironmentFault
from cdc.model import Lsn
from cdc.service import status
from cdc.service.health import has_reached, reasons
from cdc.service.restarts import Attempts, is_final
from cdc.service.supervisor import Part, StateLock, Supervisor
from tests.fix_processes import wait_until

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_delay_doubles_and_is_bounded() -> None:
    attempts = Attempts()
    delays = []
    for _ in range(9):
        attempts = attempts.ended(ran_for=1)
        delays.append(attempts.delay)
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_part_that_stayed_up_starts_counting_afresh() -> None:
    assert Attempts(failures=7).ended(ran_for=3600).delay == 0.5


def test_a_crash_is_started_again_and_a_final_error_is_not() -> None:
    assert [is_final(code) for code in (1, 2, 3)] == [True] * 3
    assert [is_final(code) for code in (-9, -15, 0, 75, 137)] == [False] * 5


def test_a_killed_part_comes_back(tmp_path: Path) -> None:
    marks = tmp_path / "starts"
    code = f"import os, time; open({str(marks)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    stop = threading.Event()
    thread = threading.Thread(target=Supervisor([Part("part", python(code))]).run, args=(stop,))
    thread.start()
    wait_until(lambda: marks.exists() and len(marks.read_text()) >= 2, 20)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_part_whose_supervisor_died_while_it_was_starting_ends_too(tmp_path: Path) -> None:
    mark, gate = tmp_path / "pid", tmp_path / "gate"
    late = f"""
import os, pathlib, time
from cdc.service.part import end_with_parent
pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))
while not pathlib.Path({str(gate)!r}).exists():
    time.sleep(0.01)
end_with_parent()
time.sleep(600)
"""
    supervisor = f"""
import pathlib, sys
from cdc.service.supervisor import Part
Part("late", [sys.executable, "-c", {late!r}]).start()
while not pathlib.Path({str(mark)!r}).exists() or not pathlib.Path({str(mark)!r}).read_text():
    pass
"""
    subprocess.run(python(supervisor), check=True)
    part = Path("/proc") / mark.read_text()
    assert part.exists()
    gate.touch()
    wait_until(lambda: not part.exists(), 20, "no orphan")


def test_a_final_error_stops_the_others_and_gives_its_code() -> None:
    sleeper = Part("sleeper", python("import time; time.sleep(600)"))
    supervisor = Supervisor([sleeper, Part("refused", python("raise SystemExit(3)"))])
    assert supervisor.run(threading.Event()) == 3
    assert sleeper.process is None


def test_a_part_that_ignores_the_request_to_stop_is_killed_at_the_deadline() -> None:
    deaf = Part("deaf", python("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"))
    stop = threading.Event()
    stop.set()
    deaf.start()
    process = deaf.process
    assert process is not None
    assert Supervisor([deaf], grace=0.5).run(stop) == 0
    assert process.poll() is not None


def test_a_second_daemon_on_the_same_state_folder_is_refused(tmp_path: Path) -> None:
    with (
        StateLock(tmp_path / "state"),
        pytest.raises(EnvironmentFault, match="already runs"),
        StateLock(tmp_path / "state"),
    ):
        pass


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be written"), StateLock(tmp_path / "file" / "state"):
        pass


def said(state: str, seconds_ago: float = 0, **facts: object) -> dict[str, object]:
    return {"state": state, "at": (NOW - timedelta(seconds=seconds_ago)).isoformat(), **facts}


def test_all_parts_working_means_ready() -> None:
    apply = said("running", sinks={"redis": {"state": "running"}})
    assert reasons(said("streaming"), apply, ("redis",), NOW) == []


def test_silence_is_not_health() -> None:
    apply = said("running", sinks={})
    assert [reason.part for reason in reasons(said("streaming", 60), apply, (), NOW)] == ["capture"]


def test_a_failed_part_gives_its_error_and_remedy() -> None:
    broken = said("failed", error={"message": "slot gone", "remedy": "resync"})
    apply = said("running", sinks={"redis": {"state": "busy", "error": "out of memory"}})
    found = [(reason.part, reason.message, reason.remedy) for reason in reasons(broken, apply, ("redis",), NOW)]
    assert found == [("capture", "slot gone", "resync"), ("sink redis", "out of memory", "")]


def test_a_sink_has_reached_an_lsn_that_ended_no_captured_transaction() -> None:
    assert has_reached(Lsn(50), reached=Lsn(40), head=Lsn(40), watermark=Lsn(60))
    assert not has_reached(Lsn(50), reached=Lsn(40), head=Lsn(45), watermark=Lsn(60))
    assert not has_reached(Lsn(50), reached=Lsn(40), head=Lsn(40), watermark=Lsn(49))
    assert has_reached(Lsn(50), reached=Lsn(50), head=Lsn(90), watermark=Lsn(0))


def test_nothing_lies_in_a_pages_header() -> None:
    page = 3 * 8192
    assert has_reached(Lsn(page + 24), reached=Lsn(0), head=Lsn(0), watermark=Lsn(page))
    assert has_reached(Lsn(page + 40), reached=Lsn(0), head=Lsn(0), watermark=Lsn(page))
    assert not has_reached(Lsn(page + 41), reached=Lsn(0), head=Lsn(0), watermark=Lsn(page))


def test_status_files_are_replaced_whole_and_private(tmp_path: Path) -> None:
    status.publish(tmp_path, "capture", {"state": "a"})
    status.publish(tmp_path, "capture", {"state": "b"})
    assert status.read(tmp_path, "capture")["state"] == "b"
    assert [path.name for path in status.folder(tmp_path).iterdir()] == ["capture.json"]
    assert (status.folder(tmp_path) / "capture.json").stat().st_mode & 0o777 == 0o600
    assert status.read(tmp_path, "apply") == {}

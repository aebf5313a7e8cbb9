"""Parts are started again where that can help, and health never lies by silence."""

import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdc.errors import EnvironmentFault
from cdc.model import Lsn
from cdc.service.daemon.restarts import Attempts, is_final
from cdc.service.daemon.supervisor import ChildProcess, StateLock, Supervisor
from cdc.service.observe.health import has_reached, reasons
from cdc.service.state import status
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


def test_a_part_that_stayed_up_is_started_again_at_once() -> None:
    steady = Attempts(failures=7).ended(ran_for=3600)
    assert steady.delay == 0
    assert steady.ended(ran_for=1).delay == 0.5


def test_a_crash_is_started_again_and_a_final_error_is_not() -> None:
    assert [is_final(code) for code in (1, 2, 3)] == [True] * 3
    assert [is_final(code) for code in (-9, -15, 0, 75, 137)] == [False] * 5


def test_a_killed_part_comes_back(tmp_path: Path) -> None:
    marks = tmp_path / "starts"
    code = f"import os, time; open({str(marks)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    stop = threading.Event()
    thread = threading.Thread(target=Supervisor([ChildProcess("part", python(code))]).run, args=(stop,))
    thread.start()
    wait_until(lambda: marks.exists() and len(marks.read_text()) >= 2, 20)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_part_whose_supervisor_died_while_it_was_starting_ends_too(tmp_path: Path) -> None:
    mark, gate = tmp_path / "pid", tmp_path / "gate"
    late = f"""
import os, pathlib, time
from cdc.service.daemon.process import end_with_parent
pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))
while not pathlib.Path({str(gate)!r}).exists():
    time.sleep(0.01)
end_with_parent()
time.sleep(600)
"""
    supervisor = f"""
import pathlib, sys
from cdc.service.daemon.supervisor import ChildProcess
ChildProcess("late", [sys.executable, "-c", {late!r}]).start()
while not pathlib.Path({str(mark)!r}).exists() or not pathlib.Path({str(mark)!r}).read_text():
    pass
"""
    subprocess.run(python(supervisor), check=True)
    part = Path("/proc") / mark.read_text()
    assert part.exists()
    gate.touch()
    wait_until(lambda: not part.exists(), 20, "no orphan")


def test_a_final_error_stops_the_others_and_gives_its_code() -> None:
    sleeper = ChildProcess("sleeper", python("import time; time.sleep(600)"))
    supervisor = Supervisor([sleeper, ChildProcess("refused", python("raise SystemExit(3)"))])
    assert supervisor.run(threading.Event()) == 3
    assert sleeper.process is None


def test_a_part_that_ignores_the_request_to_stop_is_killed_at_the_deadline() -> None:
    deaf = ChildProcess("deaf", python("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"))
    stop = threading.Event()
    stop.set()
    deaf.start()
    process = deaf.process
    assert process is not None
    assert Supervisor([deaf], grace=0.5).run(stop) == 0
    assert process.poll() is not None


def _left(mark: Path) -> bool:
    """Whether the process whose pid is written there runs; a zombie does not."""
    stat = Path("/proc", mark.read_text(), "stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_what_a_killed_part_leaves_behind_is_ended_before_it_starts_again(tmp_path: Path) -> None:
    mark, starts = tmp_path / "pid", tmp_path / "starts"
    code = f"""
import os, pathlib, subprocess, sys, time
starts, mark = pathlib.Path({str(starts)!r}), pathlib.Path({str(mark)!r})
if not starts.exists():
    starts.touch()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    mark.write_text(str(child.pid))
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
    part, stop = ChildProcess("part", python(code)), threading.Event()
    thread = threading.Thread(target=Supervisor([part], grace=0.5).run, args=(stop,))
    thread.start()
    wait_until(lambda: part.restarts == 1 and part.process is not None, 20, "a second start")
    wait_until(lambda: not _left(mark), 20, "nothing of the first one")
    stop.set()
    thread.join(20)


def test_a_part_that_hangs_with_nobody_to_kill_it_ends_itself_and_all_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"""
import pathlib, subprocess, sys, threading, time
from cdc.service.daemon import process as part
part.STOP_SECONDS = 0.3
sys.argv = ["part", "--config", {str(tmp_path / "millrace.yaml")!r}]
def hang(_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path({str(mark)!r}).write_text(str(child.pid))
    threading.Event().wait()
part.settings_from = hang
sys.exit(part.main("part", None))
"""
    process = subprocess.Popen(python(code), process_group=0)
    wait_until(lambda: mark.exists() and mark.read_text(), 20, "a child")
    process.terminate()
    assert process.wait(120) == -signal.SIGKILL
    wait_until(lambda: not _left(mark), 20, "no orphan")


def test_a_signal_is_heard_wherever_the_main_thread_is(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"""
import pathlib, signal, threading
from cdc.service.daemon import signals
stop, again = threading.Event(), threading.Event()
signals.set_on_signal({{signal.SIGTERM: stop, signal.SIGHUP: again}})
pathlib.Path({str(ready)!r}).touch()
while not stop.is_set():
    again.wait(0)
    again.clear()
"""
    process = subprocess.Popen(python(code))
    wait_until(ready.exists, 20, "a process that listens")
    for _ in range(20_000):
        process.send_signal(signal.SIGHUP)
    process.terminate()
    assert process.wait(120) == 0


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
    assert found == [("capture", "slot gone.", "resync"), ("sink redis", "out of memory.", "")]


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

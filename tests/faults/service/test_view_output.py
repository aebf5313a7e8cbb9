"""kill -9 of capture and of a view at every step of a view's output: its rows are in the log exactly once."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cdc.model import TICKS_TABLE
from tests.contract.logs import LOGS, Bench, open_reader, read_all, settings_of
from tests.fix_processes import Program, RunProgram, wait_until
from tests.scenes.view_rows import TABLE, output
from views.output_files import OutputFolder

POINTS = ("views.before_append", "views.after_append", "views.after_remove")


@pytest.fixture(params=[name for name in LOGS if name != "segments in a bucket"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return LOGS[request.param](request)


def _lsns(bench: Bench) -> list[int]:
    """The LSN of every row of the view, in the order of the log."""
    return [row["version"] for row in read_all(open_reader(bench)).to_pylist() if row["table"] == str(TABLE)]


def _put(folder: OutputFolder, numbers: Sequence[int]) -> None:
    for number in numbers:
        folder.put(output(f"mark {number - 1}" if number > 1 else "", f"mark {number}", number, 1))


def _start(run_program: RunProgram, bench: Bench, fail: str = "") -> Program:
    arguments = ("-m", "tests.faults.service.view_output_child", json.dumps(bench.data()))
    return run_program(*arguments, env={"MILLRACE_FAIL": fail})


@pytest.mark.parametrize("when", [1, 2])
def test_capture_killed_at_any_step_appends_each_row_exactly_once(
    bench: Bench, run_program: RunProgram, when: int
) -> None:
    folder = OutputFolder(settings_of(bench.data()).state, "totals")
    numbers = iter(range(1, 100))
    last = 0
    for point in (*POINTS, *(point for point in bench.fail_points if point != "log.spool_publish")):
        program = _start(run_program, bench, f"{point}:kill@{when}")
        while program.running():
            if len(folder.pending()) < 2:
                last = next(numbers)
                _put(folder, [last])
        assert program.wait() == -signal.SIGKILL, program.said()
    program = _start(run_program, bench)
    wait_until(lambda: not folder.pending(), 60, "the rest to be appended")
    program.kill()
    assert _lsns(bench) == list(range(1, last + 1))
    assert folder.mark() == f"mark {last}"


def test_a_view_killed_after_it_has_handed_over_computes_again_and_nothing_is_doubled(
    bench: Bench, run_program: RunProgram
) -> None:
    """It begins again at the log's mark, with output of before its death still in the folder or in the log."""
    state = settings_of(bench.data()).state
    folder = OutputFolder(state, "totals")
    _put_and_die(state, 1)
    assert len(folder.pending()) == 1
    program = _start(run_program, bench)
    wait_until(lambda: folder.mark() == "mark 1", 60, "the first row in the log")
    _put_and_die(state, 2)
    _put(folder, [2, 3])  # without `clear`, as if the same batch had been computed by another process
    wait_until(lambda: not folder.pending(), 60, "the rows in the log")
    program.kill()
    assert _lsns(bench) == [1, 2, 3]


def _put_and_die(state: Path, number: int) -> None:
    code = f"""
from pathlib import Path
from tests.faults.service.test_view_output import OutputFolder, _put
_put(OutputFolder(Path({str(state)!r}), "totals"), [{number}])
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env={"MILLRACE_FAIL": "views.after_put:kill", "PYTHONPATH": "."}, check=False
    )
    assert ended.returncode == -signal.SIGKILL


def test_ticks_come_back_from_either_log_in_order(bench: Bench, run_program: RunProgram) -> None:
    OutputFolder(settings_of(bench.data()).state, "totals").ask_for_ticks(0.05)
    program = _start(run_program, bench)
    wait_until(lambda: len(_ticks(bench)) >= 3, 60, "ticks")
    program.kill()
    found = _ticks(bench)
    assert found == sorted(set(found))


def _ticks(bench: Bench) -> list[str]:
    """The times of all ticks, in the order of the log."""
    found = read_all(open_reader(bench)).to_pylist()
    return [json.loads(row["after"])["at"] for row in found if row["table"] == TICKS_TABLE and row["op"] == "m"]

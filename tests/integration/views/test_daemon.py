"""A pipeline with views, without sinks and so without Spark: the third process, reloads, kills."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cdc.log
from cdc.service.daemon.process import settings_from
from cdc.service.views.view_run import OpenView
from tests.fix_processes import Program, RunProgram, wait_until
from tests.fix_servers import Database
from tests.fix_views import ENVIRONMENT
from tests.integration.service.test_daemon import Daemon

COPY = {"kind": "copied", "name": "copy", "source": "public.items"}
pytestmark = pytest.mark.usefixtures("copy_engine")


@pytest.fixture
def daemon(
    database: Database,
    state_dir: Path,
    tmp_path: Path,
    run_program: RunProgram,
    copy_engine: Callable[[], OpenView],
) -> Iterator[Daemon]:
    database.execute("create table items (id int primary key, label text)", "insert into items values (0, 'first')")

    def run(*arguments: str) -> Program:
        return run_program(*arguments, env=ENVIRONMENT)

    yield Daemon(database, state_dir, tmp_path, run)  # type: ignore[arg-type]


def _keys(daemon: Daemon, table: str = "view.copy") -> list[int]:
    """The ids of a table's rows in the log, in order."""
    reader = cdc.log.open_reader(settings_from(daemon.config))
    found = [row for piece in reader.read(reader.start()) for row in piece.rows.to_pylist()]
    return [json.loads(row["key"])["id"] for row in found if row["table"] == table and row["key"]]


def _view(daemon: Daemon, name: str = "copy") -> dict[str, Any]:
    views: Any = daemon.facts("views").get("views") or {}
    return dict(views.get(name, {}))


def _parts(daemon: Daemon) -> set[str]:
    return set(daemon.facts("daemon").get("parts") or {})


def _insert(daemon: Daemon, *numbers: int) -> None:
    daemon.database.execute(*(f"insert into items values ({number}, 'more')" for number in numbers))


def test_views_come_and_go_by_reload_and_each_row_is_copied_once_whatever_is_killed(daemon: Daemon) -> None:
    program = daemon.start()
    wait_until(lambda: daemon.readyz()[0] == 200, 90, "readiness without views")
    assert _parts(daemon) == {"capture", "apply"}
    daemon.write(views=[COPY])
    program.send(signal.SIGHUP)
    wait_until(lambda: _keys(daemon) == [0], 60, "the copy of the first row")
    wait_until(lambda: daemon.readyz()[0] == 200 and _parts(daemon) == {"capture", "views", "apply"}, 60)
    for round_, part in enumerate(("views", "capture", "views"), 1):
        _insert(daemon, 2 * round_ - 1)
        os.kill(int(daemon.facts(part)["pid"]), signal.SIGKILL)
        _insert(daemon, 2 * round_)
        wait_until(lambda: len(_keys(daemon)) == 2 * round_ + 1, 90, f"the rows after {part} was killed")  # noqa: B023
    assert _keys(daemon) == list(range(7))
    wait_until(lambda: daemon.readyz()[0] == 200, 60, "readiness after the kills")
    _a_failed_view_stops_nothing(daemon, program)
    _a_view_that_left_the_file_ends(daemon, program)
    assert program.terminate(60) == 0


def _a_failed_view_stops_nothing(daemon: Daemon, program: Program) -> None:
    bad = {**COPY, "name": "bad", "fail": "final"}
    daemon.write(views=[COPY, bad])
    program.send(signal.SIGHUP)
    wait_until(lambda: _view(daemon, "bad").get("state") == "failed", 60, "the failure")
    _insert(daemon, 7)
    wait_until(lambda: _keys(daemon)[-1] == 7, 60, "the other view's row")
    wait_until(lambda: "millrace resume view.bad" in daemon.readyz()[1], 30, "the remedy")
    (reason,) = json.loads(daemon.readyz()[1])["reasons"]
    assert (reason["part"], reason["message"]) == ("view bad", "failed: The copy fails on purpose.")
    daemon.write(views=[COPY, {**bad, "fail": ""}])
    program.send(signal.SIGHUP)
    wait_until(lambda: _keys(daemon, "view.bad") == list(range(8)), 60, "the rows under another definition")
    wait_until(lambda: daemon.readyz()[0] == 200, 60, "readiness")


def _a_view_that_left_the_file_ends(daemon: Daemon, program: Program) -> None:
    pid = int(daemon.facts("views")["pid"])
    daemon.write()
    program.send(signal.SIGHUP)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60, "the end of the views process")
    _insert(daemon, 8)
    daemon.settle()
    assert _keys(daemon)[-1] == 7
    wait_until(lambda: daemon.readyz()[0] == 200 and _parts(daemon) == {"capture", "apply"}, 60)
    assert program.running()

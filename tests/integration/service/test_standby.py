"""Two daemons on one state folder: one works, one waits and takes over. Without sinks, and so without Spark."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cdc.service.standby.lease import current
from tests.fix_processes import Program, RunProgram, wait_until
from tests.fix_proxy import MakeProxy
from tests.fix_servers import Database
from tests.integration.service.test_daemon import Daemon
from tests.scenes.frozen import family


class Pair:
    """An active daemon and a standby, each with a pipeline file of its own for the same state folder."""

    def __init__(self, database: Database, state: Path, folder: Path, run_program: RunProgram) -> None:
        self.database, self._run = database, run_program
        for name in ("first", "second"):
            (folder / name).mkdir()
        self.first = Daemon(database, state, folder / "first", run_program)
        self.second = Daemon(database, state, folder / "second", run_program)

    def start(self) -> tuple[Program, Program]:
        """Start both; returns when one works and the other waits."""
        active = self.first.start()
        self.first.settle()
        standby = self._run("-m", "cdc.cli.main", "run", "--standby", "--config", str(self.second.config))
        wait_until(lambda: '"state":"standby"' in self.second.readyz()[1], 60, "a standby that says so")
        wait_until(lambda: self.first.facts("daemon")["lease"]["standbys"], 30, "a holder that knows its standby")
        return active, standby

    def insert(self, first: int, last: int) -> None:
        """Rows with these keys."""
        self.database.execute(f"insert into items select g, 'x' from generate_series({first}, {last}) g")

    def wait_taken_over(self, standby: Program) -> float:
        """Wait until the second daemon captures; returns the seconds until it had the lease, for on a busy machine the
        start of a process takes any time."""
        began = time.monotonic()
        wait_until(lambda: (lease := current(self.second.state)) and lease.holder.pid == standby.pid, 30, "the lease")
        took = time.monotonic() - began

        def captures() -> bool:
            daemon, capture = self.second.facts("daemon"), self.second.facts("capture")
            parts = daemon.get("parts") or {}
            return (
                daemon.get("pid") == standby.pid
                and capture.get("pid") == parts.get("capture", {}).get("pid")
                and capture.get("state") == "streaming"
            )

        wait_until(captures, 30, "the standby to capture")
        print(f"lease after {took:.1f} s, streaming after {time.monotonic() - began:.1f} s")
        return took

    def assert_complete(self, rows: int) -> None:
        """Every row is in the log once."""
        self.second.settle()
        keys = [key for key, _ in self.second.rows()]
        assert len(keys) == len(set(keys)) == rows


@pytest.fixture
def pair(database: Database, state_dir: Path, tmp_path: Path, run_program: RunProgram) -> Pair:
    database.execute("create table items (id int primary key, label text)", "insert into items values (0, 'first')")
    return Pair(database, state_dir, tmp_path, run_program)


def test_a_standby_takes_over_from_a_daemon_that_was_killed_with_its_parts(pair: Pair) -> None:
    active, standby = pair.start()
    assert pair.second.readyz()[0] == 200
    pair.insert(1, 50)
    for pid in family(active.pid):
        os.kill(pid, signal.SIGKILL)
    pair.insert(51, 100)
    took = pair.wait_taken_over(standby)
    pair.assert_complete(101)
    assert took < 6
    wait_until(lambda: '"state":"active"' in pair.second.readyz()[1], 30)
    assert pair.second.facts("daemon")["lease"]["takeovers"] == 1
    assert "taking over: pid" in standby.said()
    assert standby.terminate() == 0


def test_a_frozen_daemon_is_replaced_and_stops_when_it_wakes_up(pair: Pair) -> None:
    active, standby = pair.start()
    pair.insert(1, 50)
    pair.first.settle()
    frozen = list(family(active.pid))
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    pair.insert(51, 100)
    took = pair.wait_taken_over(standby)
    assert took < 10
    pair.second.settle()
    for pid in reversed(frozen):  # the parts before the daemon, which would end them
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert active.wait(30) == 4
    assert "another daemon has taken over" in " ".join(active.said().split())
    pair.insert(101, 150)
    pair.assert_complete(151)
    assert pair.second.facts("daemon")["pid"] == standby.pid
    third = pair.first.start()
    assert third.wait(60) == 3
    assert f"pid {standby.pid}" in " ".join(third.said().split())
    assert standby.terminate() == 0


def test_a_daemon_that_is_cut_off_from_the_source_gives_way_to_one_that_reaches_it(
    pair: Pair, proxy: MakeProxy
) -> None:
    between = proxy(pair.database.server.port)
    text = pair.first.config.read_text()
    pair.first.config.write_text(text.replace(f"port: {pair.database.server.port}", f"port: {between.port}"))
    active, standby = pair.start()
    between.stall()
    pair.insert(1, 50)
    took = pair.wait_taken_over(standby)
    assert took < 10
    assert active.wait(30) == 4
    between.pass_on()
    pair.assert_complete(51)
    assert "has not reached the source" in standby.said()
    assert standby.terminate() == 0


def test_a_standby_starts_at_once_where_nobody_is_active_and_after_a_tidy_end(
    pair: Pair, run_program: RunProgram
) -> None:
    first = run_program("-m", "cdc.cli.main", "run", "--standby", "--config", str(pair.first.config))
    pair.first.settle()
    second = run_program("-m", "cdc.cli.main", "run", "--standby", "--config", str(pair.second.config))
    wait_until(lambda: '"state":"standby"' in pair.second.readyz()[1], 60)
    status = run_program("-m", "cdc.cli.main", "status", "--json", "--config", str(pair.second.config))
    assert status.wait(60) == 0, status.said()
    facts = json.loads(status.output.read_text())
    assert [one["pid"] for one in facts["standbys"]] == [second.pid]
    assert first.terminate() == 0
    pair.wait_taken_over(second)
    lease = current(pair.second.state)
    assert lease is not None
    assert lease.takeovers == 0
    assert second.terminate() == 0

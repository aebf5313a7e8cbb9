"""`millrace run` as a whole, without sinks and so without Spark: locks, signals, budgets, a source that is away."""

import json
import random
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import cdc.log
from cdc.model import parse_lsn
from cdc.service.daemon.process import settings_from
from cdc.service.state import status
from deploy.local import ports
from tests.fix_processes import Program, RunProgram, wait_until
from tests.fix_servers import Database, MakeDisk, PostgresServer


class Daemon:
    """A pipeline of one table into its log."""

    def __init__(self, database: Database, state: Path, folder: Path, run_program: RunProgram) -> None:
        self.database, self.state, self.config = database, state, folder / "millrace.yaml"
        self.port = ports.pick()
        self._run = run_program
        self.write()

    def write(self, **sections: object) -> None:
        """The pipeline file."""
        source = {
            "host": self.database.server.host,
            "port": self.database.server.port,
            "database": self.database.name,
            "user": "postgres",
            "password": self.database.server.password,
            "slot": self.database.name,
            "tables": ["public.items"],
            "heartbeat_seconds": 1,
        }
        facts = {"state": str(self.state), "source": source, "http": {"port": self.port}, **sections}
        self.config.write_text(yaml.safe_dump(facts))

    def start(self) -> Program:
        """Start it."""
        return self._run("-m", "cdc.cli.main", "run", "--config", str(self.config))

    def facts(self, part: str) -> dict[str, Any]:
        """What a part last said."""
        return status.read(self.state, part)

    def readyz(self) -> tuple[int, str]:
        """Status code and body; 0 while nobody answers. To load certificates would take most of a call's CPU."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/readyz", trust_env=False, verify=False, timeout=5)
        except httpx.HTTPError:
            return 0, ""
        return answer.status_code, answer.text

    def rows(self) -> list[tuple[str, str]]:
        """Key and operation of everything in the log."""
        reader = cdc.log.open_reader(settings_from(self.config))
        found = [row for piece in reader.read(reader.start()) for row in piece.rows.to_pylist()]
        return [(row["key"], row["op"]) for row in found if row["key"]]

    def settle(self) -> None:
        """Wait until the log has everything that is committed now."""
        with self.database.connect() as connection:
            row = connection.execute("select pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        wanted = parse_lsn(row[0])
        wait_until(lambda: int(self.facts("capture").get("watermark") or 0) >= wanted, 90, f"the log at {row[0]}")


@pytest.fixture
def daemon(database: Database, state_dir: Path, tmp_path: Path, run_program: RunProgram) -> Daemon:
    database.execute("create table items (id int primary key, label text)", "insert into items values (0, 'first')")
    return Daemon(database, state_dir, tmp_path, run_program)


def test_a_second_daemon_on_the_same_state_folder_ends_with_3_and_disturbs_nobody(daemon: Daemon) -> None:
    first = daemon.start()
    daemon.settle()
    daemon.write(http={"port": ports.pick()})
    second = daemon.start()
    assert second.wait(60) == 3
    assert f"pid {first.pid}" in " ".join(second.said().split())
    daemon.database.execute("insert into items values (1, 'x')")
    daemon.settle()
    assert first.terminate() == 0


def test_a_second_daemon_on_the_same_slot_ends_with_its_reason(
    daemon: Daemon, tmp_path: Path, run_program: RunProgram
) -> None:
    first = daemon.start()
    daemon.settle()
    (tmp_path / "other").mkdir()
    other = Daemon(daemon.database, tmp_path / "other" / "state", tmp_path / "other", run_program)
    second = other.start()
    assert second.wait(90) == 1
    assert "was not created for this log" in " ".join(second.said().split())
    daemon.database.execute("insert into items values (1, 'x')")
    daemon.settle()
    assert first.terminate() == 0


def test_a_source_that_is_away_at_the_start_is_waited_for_and_health_says_so(
    daemon: Daemon, postgres_server: PostgresServer
) -> None:
    postgres_server.stop()
    program = daemon.start()
    wait_until(lambda: "Connecting to database" in daemon.readyz()[1], 60, "the reason in /readyz")
    assert daemon.readyz()[0] == 503
    assert httpx.get(f"http://127.0.0.1:{daemon.port}/livez", trust_env=False).status_code == 200
    postgres_server.start()
    wait_until(lambda: daemon.readyz()[0] == 200, 90, "a ready pipeline")
    assert daemon.rows() == [('{"id":0}', "r")]
    assert program.terminate() == 0


def test_every_part_ends_with_a_daemon_that_was_killed(daemon: Daemon) -> None:
    program = daemon.start()
    daemon.settle()
    wait_until(lambda: daemon.facts("apply").get("state") == "running", 60)
    parts = [int(daemon.facts(name)["pid"]) for name in ("capture", "apply")]
    program.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in parts), 60, "no orphan")
    again = daemon.start()
    daemon.database.execute("insert into items values (1, 'x')")
    daemon.settle()
    assert again.terminate() == 0
    assert daemon.rows() == [('{"id":0}', "r"), ('{"id":1}', "c")]


def test_a_part_over_its_memorys_budget_is_started_again_with_the_reason(daemon: Daemon) -> None:
    daemon.write(budgets={"capture_memory_mb": 10})
    program = daemon.start()

    def restarted() -> bool:
        part = (daemon.facts("daemon").get("parts") or {}).get("capture", {})
        return "more than budgets.capture_memory_mb (10)" in part.get("last_exit", "") and part["restarts"] > 0

    wait_until(restarted, 60, "a restart for its memory")
    assert program.running()
    assert program.terminate() == 0


def test_a_disk_over_its_budget_stops_the_reading_keeps_the_slot_and_room_lets_it_go_on(
    database: Database, small_disk: MakeDisk, tmp_path: Path, run_program: RunProgram
) -> None:
    database.execute("create table items (id int primary key, label text)")
    disk = small_disk(48)
    daemon = Daemon(database, disk / "state", tmp_path, run_program)
    daemon.write(budgets={"free_mb": 20})
    program = daemon.start()
    daemon.settle()
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(40 << 20))
    database.execute("insert into items select g, repeat(md5(g::text), 8) from generate_series(1, 3000) g")
    before = confirmed(database)
    wait_until(lambda: "budgets.free_mb" in daemon.readyz()[1], 60, "the reason in /readyz")
    assert daemon.readyz()[0] == 503
    assert daemon.facts("capture")["state"] == "blocked"
    wait_until(lambda: "budgets.free_mb" in daemon.facts("daemon")["disk"]["message"], 30, "the daemon's own status")
    assert not threading.Event().wait(2.5)  # heartbeats, in which nothing may be confirmed
    assert confirmed(database) == before
    assert daemon.rows() == []
    ballast.unlink()
    daemon.settle()
    wait_until(lambda: confirmed(database) > before, 30, "the slot to move on")
    wait_until(lambda: daemon.readyz()[0] == 200, 30)
    assert len(daemon.rows()) == 3000
    assert program.terminate() == 0


def confirmed(database: Database) -> int:
    """What the slot was told."""
    with database.connect() as connection:
        row = connection.execute(
            "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", (database.name,)
        ).fetchone()
    assert row is not None
    return int(parse_lsn(row[0]))


def test_reload_takes_a_table_over_without_a_restart_and_refuses_a_wrong_file(
    daemon: Daemon, run_program: RunProgram
) -> None:
    program = daemon.start()
    daemon.settle()
    pid = daemon.facts("capture")["pid"]
    good = daemon.config.read_text()
    daemon.config.write_text(good.replace("heartbeat_seconds", "hartbeat_seconds"))
    program.send(signal.SIGHUP)
    outcome: dict[str, Any] = wait_until(lambda: daemon.facts("daemon").get("reload") or {}, 30)
    assert outcome["ok"] is False
    assert "heartbeat_seconds" in outcome["message"]
    daemon.database.execute("create table more (id int primary key)", "insert into more values (7)")
    daemon.config.write_text(good.replace("- public.items", "- public.items\n  - public.more"))
    command = run_program("-m", "cdc.cli.main", "reload", "--config", str(daemon.config), "--json")
    assert command.wait(90) == 0, command.said()
    assert json.loads(command.output.read_text())["changed"] == ["table public.more added"]
    wait_until(lambda: ('{"id":7}', "r") in daemon.rows(), 60, "the backfill of the added table")
    assert daemon.facts("capture")["pid"] == pid
    assert program.terminate() == 0


def interrupted(daemon: Daemon, seconds: float) -> None:
    """Start it, and ask it to end after a while, whatever it is doing."""
    program = daemon.start()
    threading.Event().wait(seconds)
    program.send(signal.SIGTERM)
    # before its handler is there, the signal ends Python itself: nothing has been begun by then
    assert program.wait(60) in (0, -signal.SIGTERM), program.said()[-3000:]


def at_moments(daemon: Daemon, moments: int, longest: float) -> None:
    chance = random.Random(70)
    for number in range(1, moments + 1):
        daemon.database.execute(f"insert into items select {number} * 1000 + g, 'x' from generate_series(1, 100) g")
        interrupted(daemon, chance.uniform(0.2, longest))
    program = daemon.start()
    wait_until(lambda: daemon.readyz()[0] == 200, 90, "it is ready: until then its status is that of the one before")
    daemon.settle()
    assert program.terminate() == 0
    rows = daemon.rows()
    # A first snapshot that was interrupted is read again by a backfill, which may also read rows of the stream.
    assert len(rows) == len(set(rows)), "something was appended twice"
    assert len({key for key, _ in rows}) == 1 + 100 * moments


def test_sigterm_at_any_moment_ends_tidily_and_neither_loses_nor_repeats(daemon: Daemon) -> None:
    at_moments(daemon, 3, 5.0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_sigterm_at_fifty_moments_ends_tidily_and_neither_loses_nor_repeats(daemon: Daemon) -> None:
    at_moments(daemon, 50, 8.0)

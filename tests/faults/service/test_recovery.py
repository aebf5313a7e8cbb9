"""kill -9 of the apply process, of its JVM and of the daemon: all of it ends, comes back, and the stores end equal."""

import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bench.soak.watch import MARK, marked
from deploy.local import ports
from tests.fix_pipeline import Pipeline
from tests.fix_processes import RunProgram, is_stopped, wait_until
from tests.fix_servers import Database

pytestmark = pytest.mark.spark


class Killed(Pipeline):
    """A pipeline whose processes can be found whatever became of their parents."""

    def __init__(self, config: Path, database: Database, run_program: RunProgram) -> None:
        super().__init__(config, database, run_program)
        self._mark = uuid.uuid4().hex
        self._rows = 0

    def run(self) -> None:
        """Start the daemon."""
        self.start(**{MARK: self._mark})

    def processes(self, program: str = "") -> list[int]:
        """The pids of all processes of this pipeline whose command has this word."""
        return [pid for pid in marked(self._mark) if program in _command(pid)]

    def appliers(self) -> list[int]:
        """The apply processes: each leads a process group. A fork that has not started its program looks like one."""
        return [pid for pid in self.processes("cdc.service.apply.process") if _group(pid) == pid]

    def only_applier(self) -> int:
        """The apply process."""
        [pid] = self.appliers()
        return pid

    def spark_reads(self) -> bool:
        """Whether Spark has ended a batch of the shared query since the start of the process."""
        commits = self.settings.state / "checkpoints" / "convoy" / "commits"
        return commits.is_dir() and any(name.name.isdigit() for name in commits.iterdir())

    def write(self) -> None:
        """Change some rows, and wait for them in every store."""
        self._rows += 1
        self.database.execute(
            f"insert into items values ({self._rows}, 'new')",
            f"update items set label = 'changed {self._rows}' where id % 2 = {self._rows % 2}",
        )
        self.settle()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def make_pipeline(
    database: Database, redis_url: str, state_dir: Path, tmp_path: Path, run_program: RunProgram
) -> Callable[[], Killed]:
    """Two stores, so that they share a query, and one small table."""
    database.execute("create table items (id int primary key, label text)", "insert into items values (0, 'first')")
    source = {
        "host": database.server.host,
        "port": database.server.port,
        "database": database.name,
        "user": "postgres",
        "password": database.server.password,
        "slot": database.name,
        "tables": ["public.items"],
        "heartbeat_seconds": 1,
    }
    sinks = [{"kind": "redis", "url": redis_url, "name": name, "prefix": f"{name}:"} for name in ("one", "two")]
    sections = {
        "state": str(state_dir),
        "source": source,
        "sinks": sinks,
        "spark": {"memory": "600m"},
        "http": {"port": ports.pick()},
    }
    config = tmp_path / "millrace.yaml"
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return lambda: Killed(config, database, run_program)


def test_a_kill_of_apply_of_its_jvm_or_of_the_daemon_leaves_no_process_and_no_difference(
    make_pipeline: Callable[[], Killed], run_program: RunProgram
) -> None:
    pipeline = make_pipeline()
    pipeline.run()
    pipeline.write()
    wait_until(pipeline.spark_reads, 120, "a batch by Spark")
    first = pipeline.only_applier()
    os.kill(first, signal.SIGSTOP)
    second = run_program("-m", "cdc.service.apply.process", "--config", str(pipeline.config))
    wait_until(lambda: f"in use by process {first}" in " ".join(second.said().split()), 60, "a second one waits")
    assert second.terminate() == 3
    os.kill(first, signal.SIGCONT)
    [java] = pipeline.processes("java")
    os.kill(java, signal.SIGKILL)
    wait_until(lambda: first not in pipeline.appliers(), 60, "the process without its JVM ends")
    pipeline.write()
    killed = pipeline.only_applier()
    os.kill(killed, signal.SIGKILL)
    pipeline.write()
    assert pipeline.only_applier() != killed
    wait_until(lambda: pipeline.processes("java"), 60, "a JVM")
    assert pipeline.daemon is not None
    stopped = pipeline.only_applier()
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: is_stopped(stopped), 30, "it has stopped")
    pipeline.daemon.kill()  # the kernel wakes what is stopped and loses its parent
    wait_until(lambda: not pipeline.processes(), 60, "no process is left")
    pipeline.run()
    pipeline.write()
    pipeline.assert_equal()
    assert pipeline.daemon.terminate() == 0
    wait_until(lambda: not pipeline.processes(), 60, "no process is left after a stop")

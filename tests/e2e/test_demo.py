"""The README's first command, also after everything it started was killed."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.service.state import status
from deploy.local.servers import Servers
from tests.fix_processes import RunProgram, wait_until

pytestmark = pytest.mark.spark


@pytest.fixture
def home(session_home: Path) -> Iterator[Path]:
    """A place for the demo's servers that their user can reach."""
    place = session_home / "demo"
    yield place
    Servers(place).down()


def kill_all(home: Path) -> None:
    """kill -9 of every server and of millrace itself."""
    os.kill(int((home / "state" / "lock").read_text()), signal.SIGKILL)
    for part in ("capture", "apply"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(str(status.read(home / "state", part)["pid"])), signal.SIGKILL)
    Servers(home).down(how=signal.SIGKILL)


def test_the_demo_ends_equal_also_after_everything_was_killed(home: Path, run_program: RunProgram) -> None:
    environment = {"MILLRACE_HOME": str(home)}
    demo = run_program("-m", "cdc.cli.main", "demo", "--seconds", "60", env=environment)
    wait_until(lambda: status.read(home / "state", "apply").get("state") == "running", 240)
    wait_until(lambda: "tx" in demo.said() and " 0 tx" not in demo.said().splitlines()[-1], 240)
    kill_all(home)
    assert demo.wait(240) != 0
    again = run_program("-m", "cdc.cli.main", "demo", "--seconds", "3", env=environment)
    assert again.wait(400) == 0, again.said()[-3000:]
    assert "All sinks equal the source." in again.said()
    assert Servers(home).status() == {}

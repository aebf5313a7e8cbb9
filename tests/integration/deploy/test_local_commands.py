"""`millrace local` as a person or a script uses it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from deploy.local.process import identify
from deploy.local.servers import Servers
from tests.fix_processes import Program, RunProgram


@pytest.fixture
def home(session_home: Path, tmp_path: Path) -> Iterator[Path]:
    folder = session_home / tmp_path.name
    folder.mkdir(parents=True)
    yield folder
    Servers(folder).down()


def finished(program: Program, code: int = 0) -> str:
    assert program.wait(60) == code, program.said()
    return program.output.read_text()


def test_up_status_and_down_tell_what_happened(run_program: RunProgram, home: Path) -> None:
    def local(*arguments: str) -> str:
        return finished(run_program("-m", "cdc.cli.main", "local", *arguments, env={"MILLRACE_HOME": str(home)}))

    facts = json.loads(local("up", "--only", "redis", "--json"))["redis"]
    assert redis.Redis(port=facts["port"]).ping()
    assert json.loads(local("status", "--json"))["redis"] == facts
    assert str(facts["pid"]) in local("up", "--only", "redis")
    assert local("down") == "Stopped redis.\n"
    assert identify(facts["pid"]) is None
    assert local("down") == "Nothing was running.\n"
    assert json.loads(local("status", "--json")) == {}


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("up", "--only", "redsi"), 2, "no local server `redsi`"),
        (("up", "--port", "redis"), 2, "not NAME=NUMBER"),
        (("up", "--kafka-brokers", "2"), 2, "too few for topics with three replicas"),
        (("up", "--home", "/proc/nowhere"), 3, "/proc/nowhere cannot be written"),
    ],
)
def test_wrong_use_is_explained_in_a_sentence(
    run_program: RunProgram, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    program = run_program("-m", "cdc.cli.main", "local", *arguments)
    finished(program, code)
    assert sentence in " ".join(program.said().split())
    assert "Traceback" not in program.said()

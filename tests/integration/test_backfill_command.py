"""`millrace backfill` against a running capture process, as a person or a script would use it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cdc.cli import main
from cdc.errors import ConfigError
from tests.fix_capture import Rig
from tests.fix_processes import Program, RunProgram, wait_until


@pytest.fixture
def captured(rig: Rig) -> Iterator[tuple[Rig, Program]]:
    """A capture process that streams."""
    rig.capture_tables(
        "create table items (id int primary key, v text)",
        "insert into items select g, 'v' from generate_series(1, 300) g",
        snapshot="initial",
    )
    program = rig.start()
    rig.wait_caught_up(program)
    yield rig, program
    program.kill()


def command(run_program: RunProgram, rig: Rig, *arguments: str) -> Program:
    config = Path(rig.state.parent / "millrace.yaml")
    program = run_program("-m", "cdc.cli.main", "backfill", *arguments, "--config", str(config))
    program.wait(60)
    return program


def test_a_backfill_is_followed_to_its_end_in_plain_lines(
    captured: tuple[Rig, Program], run_program: RunProgram
) -> None:
    rig, _ = captured
    done = command(run_program, rig, "public.items", "--since", "id=291")
    assert done.wait() == 0, done.said()
    assert done.said().splitlines()[-1] == "public.items done: 10 rows"
    assert sum(row["op"] == "r" for row in rig.rows()) == 310


def test_json_gives_the_outcome_and_the_list_shows_it(captured: tuple[Rig, Program], run_program: RunProgram) -> None:
    rig, _ = captured
    done = command(run_program, rig, "public.items", "--keys", "1,2", "--json")
    facts = json.loads(done.said())
    assert (facts["state"], facts["rows"], facts["table"]) == ("done", 2, "public.items")
    listed = json.loads(command(run_program, rig, "--json").said())
    assert [job["id"] for job in listed] == [facts["id"]]


def test_a_failed_backfill_has_exit_code_one_and_its_reason(
    captured: tuple[Rig, Program], run_program: RunProgram
) -> None:
    rig, _ = captured
    failed = command(run_program, rig, "public.items", "--where", "nonsense > 1")
    assert failed.wait() == 1
    assert 'column "nonsense" does not exist' in failed.said()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("public.other",), "public.other is not captured"),
        (("items",), "is not a table"),
        (("public.items", "--since", "id"), "is not COLUMN=VALUE"),
        (("public.items", "--keys", "[1"), "--keys is not valid JSON"),
    ],
    ids=["table", "name", "since", "keys"],
)
def test_a_wrong_request_is_refused_before_it_is_sent(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    config = tmp_path / "millrace.yaml"
    config.write_text(yaml.safe_dump({"source": {"port": 1, "tables": ["public.items"]}}))
    with pytest.raises(ConfigError, match=re.escape(said)):
        main.app(["backfill", *arguments, "--config", str(config)], standalone_mode=False)


def test_a_request_made_while_nobody_captures_is_obeyed_at_the_next_start(
    captured: tuple[Rig, Program], run_program: RunProgram
) -> None:
    rig, program = captured
    assert program.terminate() == 0
    sent = command(run_program, rig, "public.items", "--no-wait")
    assert sent.wait() == 0, sent.said()
    again = rig.start()
    wait_until(lambda: sum(row["op"] == "r" for row in rig.rows()) == 600, 60, "the table is read again")
    assert again.terminate() == 0

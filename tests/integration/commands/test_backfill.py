"""`millrace backfill` against a running capture process, as a person or a script would use it."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from cdc.cli import main
from cdc.errors import ConfigError
from cdc.model import TableId
from snapshots.backfill.requests import JobControl, Request, parse_message
from snapshots.backfill.signing_key import control_key
from tests.fix_capture import Rig
from tests.fix_processes import Program, RunProgram, wait_until

ROOT = Path(__file__).parents[3]


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
        (("public.items", "--keys", ""), "--keys names no key"),
        (("public.items", "--where", " "), "--where is empty"),
        (("public.items", "--since", ""), "is not COLUMN=VALUE"),
        (("--pause", "1A2B"), "There is no backfill 1A2B"),
    ],
    ids=["table", "name", "since", "keys", "no-keys", "no-condition", "no-since", "id"],
)
def test_a_wrong_request_is_refused_before_it_is_sent(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    config = tmp_path / "millrace.yaml"
    config.write_text(yaml.safe_dump({"source": {"port": 1, "tables": ["public.items"]}}))
    with pytest.raises(ConfigError, match=re.escape(said)):
        main.app(["backfill", *arguments, "--config", str(config)], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("public.items", "--keys", "17"), Request(TableId("public", "items"), keys=(("17",),))),
        (("public.items", "--where", "v = 'it''s'"), Request(TableId("public", "items"), where="v = 'it''s'")),
        (("--cancel", "all"), JobControl("cancel", "all")),
    ],
    ids=["keys", "condition", "cancel"],
)
def test_a_request_can_be_had_as_signed_sql(
    rig: Rig, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], meant: object
) -> None:
    key = control_key(rig.state, create=True)
    config = rig.state.parent / "millrace.yaml"
    sections = {"state": str(rig.state), "source": {"port": 1, "tables": ["public.items"]}}
    config.write_text(yaml.safe_dump(sections))
    main.app(["backfill", *arguments, "--sql", "--config", str(config)], standalone_mode=False)
    statement = capsys.readouterr().out.strip()
    found = re.fullmatch(r"select pg_logical_emit_message\(true, 'millrace', (.*)\);", statement)
    assert found is not None
    assert parse_message(rig.ask(f"select {found[1].replace('%', '%%')}").encode(), key) == meant


SLOWLY = ("--where", "pg_sleep(2) is not null")


def test_a_backfill_is_paused_resumed_and_cancelled_by_its_id(
    captured: tuple[Rig, Program], run_program: RunProgram
) -> None:
    """Neither the next backfill nor the end of the process waits for the query of one that nobody wants."""
    rig, program = captured
    command(run_program, rig, "public.items", *SLOWLY, "--no-wait")
    wait_until(lambda: [job["state"] for job in rig.status().get("backfills", [])] == ["running"], 30, "it runs")
    (job,) = rig.status()["backfills"]
    for verb, state in (("--pause", "paused"), ("--resume", "running"), ("--cancel", "cancelled")):
        done = command(run_program, rig, verb, job["id"] if verb != "--resume" else "all")
        assert (done.wait(), done.said()) == (0, f"Backfill {job['id']} of public.items is {state}.\n")
    listed = command(run_program, rig).said().split("\t")
    assert listed[:4] == [job["id"], "public.items", "cancelled", "0"]
    assert command(run_program, rig, "public.items", "--keys", "1").wait() == 0
    assert program.terminate(20) == 0


def test_whoever_stops_looking_is_told_that_the_backfill_goes_on(
    captured: tuple[Rig, Program], run_program: RunProgram
) -> None:
    rig, _ = captured
    config = str(rig.state.parent / "millrace.yaml")
    program = run_program("-m", "cdc.cli.main", "backfill", "public.items", *SLOWLY, "--config", config)
    wait_until(lambda: "public.items running" in program.said(), 30, "its first line")
    program.send(signal.SIGINT)
    assert program.wait(30) == 1
    assert "continues in the background" in program.said() and "--cancel" in program.said()


def test_a_terminal_shows_a_bar_with_rate_and_time_left(captured: tuple[Rig, Program]) -> None:
    """The third chunk stalls until the bar is seen: no machine is too fast for it."""
    rig, program = captured
    rig.database.execute("insert into items select g, 'v' from generate_series(1001, 20000) g", "analyze items")
    assert program.terminate() == 0
    stalling = rig.start(fail="backfill.after_low:stall@3")
    rig.wait_caught_up(stalling)

    def let_go() -> None:
        stalling.kill()
        rig.start()

    config = str(rig.state.parent / "millrace.yaml")
    arguments = [sys.executable, "-m", "cdc.cli.main", "backfill", "public.items", "--config", config]
    figures = r"[\d,]+ of about 19,300 rows, [\d,]+ rows/s, \d:\d\d:\d\d left"
    shown = on_a_terminal(arguments, figures, let_go)
    assert re.search(figures, shown)
    assert "public.items done" in shown and "19,300 rows" in shown
    assert "━" in shown


def on_a_terminal(arguments: list[str], awaited: str, act: Callable[[], None]) -> str:
    """What a program writes when its output is a terminal of 140 columns. `act` is called once the pattern is shown."""
    ours, its = pty.openpty()
    environment = {**os.environ, "COLUMNS": "140", "TERM": "xterm"}
    with subprocess.Popen(arguments, stdin=its, stdout=its, stderr=its, env=environment, cwd=ROOT) as child:
        os.close(its)
        shown, acted = b"", False
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(ours, 65536):
                shown += data
                if not acted and re.search(awaited, _text(shown)):
                    act()
                    acted = True
        os.close(ours)
        assert child.wait(60) == 0
    return _text(shown)


def _text(shown: bytes) -> str:
    """Without the terminal's control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode(errors="replace"))


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

"""The command line as people meet it: sentences, exit codes, JSON on request."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cdc.cli.reference import http
from cdc.cli.reference.configuration import reference
from tests.fix_processes import Program, RunProgram

ROOT = Path(__file__).parents[3]


@pytest.fixture
def millrace(run_program: RunProgram) -> RunProgram:
    def run(*arguments: str, env: dict[str, str] | None = None) -> Program:
        return run_program("-m", "cdc.cli.main", *arguments, env=env)

    return run  # type: ignore[return-value]


def refused(program: Program, code: int) -> str:
    assert program.wait(60) == code, program.said()
    said = program.said()
    assert "Traceback" not in said
    return " ".join(said.split())


def test_init_writes_a_file_that_validates(millrace: RunProgram, tmp_path: Path) -> None:
    config = str(tmp_path / "millrace.yaml")
    assert millrace("init", config).wait() == 0
    checked = millrace("validate", "--config", config, "--json")
    assert checked.wait() == 0
    assert json.loads(checked.output.read_text())["sinks"] == ["delta", "opensearch", "redis"]
    assert "exists already" in refused(millrace("init", config), 2)


def test_an_unknown_key_ends_with_2_and_the_nearest_key(millrace: RunProgram, tmp_path: Path) -> None:
    config = tmp_path / "millrace.yaml"
    config.write_text("source: {hots: db}\n")
    for command in (["validate"], ["run"], ["status"], ["verify"], ["doctor"], ["config", "show"]):
        said = refused(millrace(*command, "--config", str(config)), 2)
        assert "source.hots" in said
        assert "'host'" in said


def test_a_missing_file_ends_with_2_and_says_how_to_make_one(millrace: RunProgram, tmp_path: Path) -> None:
    assert "millrace init" in refused(millrace("run", "--config", str(tmp_path / "none.yaml")), 2)


def test_a_state_folder_that_cannot_be_written_ends_with_3(millrace: RunProgram, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = tmp_path / "millrace.yaml"
    config.write_text(f"state: {tmp_path / 'file' / 'state'}\nsource: {{tables: [public.a]}}\n")
    assert "state folder" in refused(millrace("run", "--config", str(config)), 3)


def test_the_settings_shown_hold_no_secret(millrace: RunProgram, tmp_path: Path) -> None:
    config = tmp_path / "millrace.yaml"
    config.write_text("source: {password: correct-horse}\nsinks: [{kind: redis, password: correct-horse}]\n")
    shown = millrace("config", "show", "--config", str(config))
    assert shown.wait() == 0
    assert "***" in shown.said()
    assert "correct-horse" not in shown.said()


def test_a_pipeline_that_never_ran_is_not_well(millrace: RunProgram, tmp_path: Path) -> None:
    config = tmp_path / "millrace.yaml"
    config.write_text(f"state: {tmp_path / 'state'}\nsinks: [{{kind: redis}}]\n")
    asked = millrace("status", "--config", str(config), "--json")
    assert asked.wait() == 1
    assert json.loads(asked.output.read_text())["ready"] is False


def test_a_wrong_lsn_is_explained(millrace: RunProgram) -> None:
    assert "16/B374D848" in refused(millrace("wait", "nonsense"), 2)


def test_every_command_has_an_example(millrace: RunProgram) -> None:
    for command in ("init", "validate", "run", "status", "wait", "demo", "doctor", "verify"):
        helped = millrace(command, "--help")
        assert helped.wait() == 0
        assert f"Example: millrace {command}" in helped.said()


@pytest.mark.parametrize(
    ("name", "generated"),
    [("configuration", reference), ("http", http.http), ("metrics", http.metrics)],
)
def test_the_references_are_current(name: str, generated: Callable[[], str]) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == generated(), "run: make docs"

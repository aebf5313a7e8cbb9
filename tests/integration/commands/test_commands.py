"""Every command as a new user meets it: help with an example, JSON, a pipe, a terminal, the shell's completion."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

import cdc.log
from cdc.cli.main import app, main
from cdc.model import LOG_SCHEMA, Entry, Lsn, TableId
from cdc.service.daemon.process import settings_from
from cdc.service.state import status
from cdc.service.state.sink_positions import consumer_name

_ESCAPE = "\x1b["


def commands() -> Iterator[list[str]]:
    """Every command and every command of a group."""
    root = get_command(app)
    for name, command in sorted(root.commands.items()):  # type: ignore[attr-defined]
        nested = getattr(command, "commands", {})
        yield from ([name, inner] for inner in sorted(nested))
        if not nested:
            yield [name]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "millrace.yaml"
    path.write_text(
        f"state: {tmp_path / 'state'}\nsource: {{tables: [public.orders, public.users]}}\nsinks: [{{kind: redis}}]\n"
    )
    return path


class Said(NamedTuple):
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def facts(self) -> Any:
        """Its JSON."""
        return json.loads(self.out)


Millrace = Callable[..., Said]


@pytest.fixture
def millrace(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Millrace:
    """Runs a command in this process: starting Python for each would take most of the time."""
    monkeypatch.setenv("MILLRACE_CONFIG", str(config))

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["millrace", *words])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        return Said(code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_explains_itself_with_an_example(words: list[str]) -> None:
    command = get_command(app)
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    text = command.help or ""
    assert re.search(rf"Examples?:\s+.*millrace {' '.join(words)}\b", text), text
    assert len(text.split("\n")[0]) < 130


def test_a_table_is_skipped_and_resumed_and_every_command_says_what_is_lacking(
    millrace: Millrace, config: Path
) -> None:
    settings = settings_from(config)
    writer = cdc.log.open_writer(settings)
    writer.append(Entry(LOG_SCHEMA.empty_table(), Lsn(500), {"reached": "500"}))
    writer.close()
    reader = cdc.log.open_reader(settings)
    reader.commit("redis", Lsn(500))
    reader.commit(consumer_name("redis", TableId.parse("public.orders")), Lsn(300))
    why = {"message": "it has no key.", "remedy": "Give it one."}
    sink = {"state": "running", "tables_waiting": {"public.orders": why}, "tables_skipped": ["public.users"]}
    status.publish(settings.state, "capture", {"state": "streaming", "watermark": 500})
    status.publish(settings.state, "apply", {"state": "running", "sinks": {"redis": sink}})
    status.publish(settings.state, "daemon", {})

    late = millrace("wait", "0/1F4", "--timeout", "0.1")
    assert late.code == 1
    assert "public.orders waits: it has no key." in " ".join(late.err.split())
    assert "--except-waiting" in late.err
    left_out = millrace("wait", "0/1F4", "--except-waiting", "--json").facts
    assert [(item["kind"], item["table"]) for item in left_out["except"]] == [
        ("waiting", "public.orders"),
        ("skipped", "public.users"),
    ]
    named = millrace("wait", "0/1F4", "--table", "public.users").out
    assert "All reached 0/1F4, except:\nredis: public.users is skipped." in named
    assert millrace("wait", "0/1F4", "--table", "public.nobody").code == 2
    shown = millrace("status").out
    assert "! sink redis: table public.orders waits: it has no key. Give it one." in shown
    assert "except redis: public.users is skipped." in shown
    listed = millrace("tables").out
    assert "public.orders\twaiting in redis" in listed
    assert "public.users\tskipped in redis" in listed

    assert millrace("skip", "public.orders", "--sink", "redis", "--json").facts["skipped"] == {
        "redis": ["public.orders"]
    }
    assert millrace("skip", "public.orders", "--sink", "nobody").code == 2
    assert millrace("resume", "public.orders", "--sink", "redis", "--json").facts["skipped"] == {}


def test_pause_and_resume_are_kept_and_shown(millrace: Millrace) -> None:
    assert millrace("pause", "redis").code == 0
    facts = millrace("pause", "public.orders", "--json").facts
    assert facts == {"sinks": ["redis"], "tables": ["public.orders"], "skipped": {}}
    assert millrace("status", "--json").facts["paused"] == facts
    assert "public.orders\tpaused" in millrace("tables").out
    assert millrace("resume", "redis").code == 0
    assert millrace("resume", "public.orders", "--json").facts == {"sinks": [], "tables": [], "skipped": {}}


def test_an_unknown_target_ends_with_2_and_the_known_ones(millrace: Millrace) -> None:
    refused = millrace("pause", "publc.orders")
    assert refused.code == 2
    said = " ".join(refused.err.split())
    assert "neither a sink nor a table" in said
    assert "public.orders, public.users" in said


def test_what_needs_a_running_pipeline_says_how_to_start_it(millrace: Millrace) -> None:
    for words, code in ((["reload"], 3), (["lag"], 1)):
        asked = millrace(*words)
        assert asked.code == code
        assert "millrace run" in asked.err
    asked = millrace("status")
    assert asked.code == 1
    assert "does not run. Start it: millrace run" in asked.out


def test_tables_without_a_running_pipeline_says_so_in_json(millrace: Millrace) -> None:
    facts = millrace("tables", "--json").facts
    assert [(one["table"], one["state"]) for one in facts] == [
        ("public.orders", "not running"),
        ("public.users", "not running"),
    ]


def test_a_broker_that_does_not_answer_is_named_within_seconds_and_what_is_known_without_it_is_shown(
    millrace: Millrace, config: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never says a word
        place = f"127.0.0.1:{deaf.getsockname()[1]}"
        config.write_text(config.read_text() + f"log: {{kind: kafka, bootstrap: '{place}'}}\n")
        state = config.parent / "state"
        status.publish(state, "capture", {"state": "streaming", "durable": 0x100})
        status.publish(
            state, "apply", {"state": "running", "sinks": {"redis": {"state": "running", "reached": "0/F0"}}}
        )
        before = time.monotonic()
        whole, positions, lag = (millrace(*words, "--json") for words in (["status"], ["log", "positions"], ["lag"]))
        assert time.monotonic() - before < 60  # 5 s each are patience, the rest is for a slow machine
    assert [said.code for said in (whole, positions, lag)] == [1, 1, 1]
    for said in (whole.out, positions.facts["trouble"], lag.facts["trouble"]):
        assert place in said
        assert "Start the brokers" in said
    assert whole.facts["reached"] == {"redis": "0/F0"}
    assert (positions.facts["end"], positions.facts["consumers"]) == (
        "0/100",
        [{"consumer": "redis", "reached": "0/F0"}],
    )
    assert lag.facts["sinks"]["redis"]["bytes"] == 0x10


def test_a_pipe_gets_plain_lines_and_a_terminal_gets_headings(config: Path) -> None:
    command = [sys.executable, "-m", "cdc.cli.main", "tables"]
    environment = {**os.environ, "MILLRACE_CONFIG": str(config), "TERM": "xterm-256color", "COLUMNS": "100"}
    piped = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert piped.stdout.splitlines()[0] == "public.orders\tnot running\t0\t0\t"
    assert _ESCAPE not in piped.stdout
    script = shutil.which("script")
    if script is None:
        pytest.skip("script(1) is not installed")
    typed = [script, "-qec", " ".join(command), "/dev/null"]
    seen = subprocess.run(typed, env=environment, capture_output=True, text=True, check=True, timeout=60, input="")
    assert "last commit" in seen.stdout
    assert _ESCAPE in seen.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_each_shell_names_the_command(millrace: Millrace, shell: str) -> None:
    script = millrace("completion", shell).out
    assert f"_MILLRACE_COMPLETE=complete_{shell}" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=30)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("millrace pau", {"pause"}),
        ("millrace pause p", {"public.orders", "public.users"}),
        ("millrace resume r", {"redis"}),
        ("millrace wait 0/0 --sink ", {"redis"}),
        ("millrace dlq re", {"retry"}),
    ],
)
def test_the_shell_completes_commands_sinks_and_tables(
    millrace: Millrace, monkeypatch: pytest.MonkeyPatch, typed: str, offered: set[str]
) -> None:
    monkeypatch.setenv("_MILLRACE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    found = millrace().out
    assert set(found.split()) >= offered
    assert all(one.startswith(typed.rpartition(" ")[2]) for one in found.split())


_BASH = """\
source "$SCRIPTS/bash"; COMP_WORDS=(millrace pause pub); COMP_CWORD=2
_millrace_completion millrace pub pause; printf "%s\\n" "${COMPREPLY[@]}"
"""
_FISH = """\
source $SCRIPTS/fish
complete -C "millrace pause pub"
"""
_ZSH = """\
cp "$SCRIPTS/zsh" "$SCRIPTS/_millrace"
zmodload zsh/zpty
zpty typing zsh -f -i
zpty -w typing 'PS1=; fpath=($SCRIPTS $fpath); autoload -Uz compinit; compinit -u -D; print GO""ON'
zpty -r -m typing seen '*GOON*'
zpty -w -n typing $'millrace pause public.o\t'
zpty -r -m typing seen '*public.orders*'
print public.orders
zpty -w -n typing $'\x15millrace pause public.u\t'
zpty -r -m typing seen '*public.users*'
print public.users
"""
_TYPED = {"bash": ("--norc", _BASH), "fish": ("--no-config", _FISH), "zsh": ("-f", _ZSH)}
"""How each shell is started without a person's own settings, and what is typed in it."""


@pytest.mark.parametrize("shell", sorted(_TYPED))
def test_the_shell_itself_completes(millrace: Millrace, tmp_path: Path, config: Path, shell: str) -> None:
    """In zsh twice: the first Tab also loads the script from `fpath`."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    binary = tmp_path / "bin" / "millrace"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m cdc.cli.main "$@"\n')
    binary.chmod(0o755)
    (binary.parent / shell).write_text(millrace("completion", shell).out)
    path = f"{binary.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MILLRACE_CONFIG": str(config), "SCRIPTS": str(binary.parent)}
    bare, code = _TYPED[shell]
    asked = [program, bare, "-c", code]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["public.orders", "public.users"]

"""Dead letters: kept, counted, tried again, given up; and never shown to others."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cdc.cli.operate import dlq
from cdc.errors import ConfigError
from cdc.key_range import KeyRange, Level, Removal
from cdc.service.observe.dead_letter_counts import DeadLetterCounts
from sinks.apply.dead_letters import DeadLetter, DeadLetters
from tests.scenes.histories import WHEN

LETTER = DeadLetter(
    table="public.items",
    key='{"id":1}',
    op="u",
    after='{"id":1,"amount":12345678901234567890.10}',
    unchanged=("big",),
    version=1 << 62,
    commit_lsn=(1 << 62) + 1,
    commit_ts=WHEN,
    schema_id=3,
    reason="refused",
    parked_at=WHEN,
)


@pytest.fixture
def letters(state_dir: Path) -> DeadLetters:
    return DeadLetters(state_dir / "dead-letters" / "memory")


def test_a_letter_comes_back_as_it_was(letters: DeadLetters) -> None:
    letters.add([LETTER])
    assert letters.list() == [LETTER]


def test_only_the_owner_can_read_them(letters: DeadLetters, state_dir: Path) -> None:
    letters.add([LETTER])
    files = list((state_dir / "dead-letters" / "memory").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_newer_change_of_the_key_replaces_the_letter_and_an_older_one_does_not(letters: DeadLetters) -> None:
    letters.add([LETTER])
    letters.add([replace(LETTER, version=LETTER.version + 1, reason="again")])
    letters.add([replace(LETTER, version=5, reason="stale")])
    assert [(letter.reason, letter.attempts) for letter in letters.list()] == [("again", 2)]


def test_a_letter_is_settled_only_by_its_own_version_or_a_newer_one(letters: DeadLetters) -> None:
    letters.add([LETTER])
    letters.resolve("public.items", [(LETTER.key, LETTER.version - 1)])
    assert letters.count() == 1
    letters.resolve("public.items", [(LETTER.key, LETTER.version)])
    assert letters.count() == 0


def test_a_truncate_overtakes_older_letters(letters: DeadLetters) -> None:
    letters.add([replace(LETTER, version=5), replace(LETTER, key='{"id":2}', version=9)])
    letters.truncate("public.items", 7)
    assert [letter.version for letter in letters.list()] == [9]


def test_a_removed_range_takes_its_older_letters(letters: DeadLetters) -> None:
    removal = Removal(KeyRange((Level(("id",), ("number",), ("1",), ("3",)),)), 7, 8, WHEN)
    letters.add([replace(LETTER, key=f'{{"id":{key}}}', version=version) for key, version in ((1, 5), (2, 9), (3, 5))])
    letters.remove("public.items", [removal])
    assert sorted(letter.key for letter in letters.list()) == ['{"id":2}', '{"id":3}']


@pytest.fixture
def config(tmp_path: Path, state_dir: Path) -> str:
    path = tmp_path / "millrace.yaml"
    path.write_text(yaml.safe_dump({"state": str(state_dir), "sinks": [{"kind": "memory"}]}))
    return str(path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(dlq.app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_shows_keys_and_reasons_but_no_values(letters: DeadLetters, config: str) -> None:
    letters.add([LETTER])
    plain = run("list", "--config", config)
    assert "refused" in plain
    assert '{"id":1}' in plain
    assert "12345678901234567890" not in plain
    assert json.loads(run("list", "--config", config, "--json"))[0]["lsn"] == "40000000/0"


def test_showing_a_letter_gives_its_values(letters: DeadLetters, config: str) -> None:
    letters.add([LETTER])
    assert json.loads(run("show", LETTER.key, "--config", config, "--json"))[0]["after"] == LETTER.after
    plain = dict(line.split("\t") for line in run("show", LETTER.key, "--config", config).splitlines())
    assert (plain["after"], plain["unchanged"], plain["lsn"]) == (LETTER.after, "big", "40000000/0")
    with pytest.raises(ConfigError, match="no dead letter"):
        run("show", '{"id":9}', "--config", config)


def test_a_retry_is_asked_for_and_a_drop_is_confirmed(letters: DeadLetters, config: str) -> None:
    letters.add([LETTER, replace(LETTER, key='{"id":2}')])
    assert "will retry 1 dead letter(s)" in run("retry", "--config", config, "--key", LETTER.key)
    assert [letter.key for letter in letters.list(retry=True)] == [LETTER.key]
    assert "Deleted 1 dead letter(s)" in run("drop", "--config", config, "--key", LETTER.key, "--yes")
    assert [letter.key for letter in letters.list()] == ['{"id":2}']


def test_retry_and_drop_say_in_json_what_they_did(letters: DeadLetters, config: str) -> None:
    letters.add([LETTER, replace(LETTER, key='{"id":2}')])
    assert json.loads(run("retry", "--config", config, "--key", LETTER.key, "--json")) == {"retried": 1}
    assert json.loads(run("drop", "--config", config, "--yes", "--json")) == {"dropped": 2}


@pytest.mark.parametrize("named", ['{"id":1}', '{ "id": 1 }', "1"])
def test_a_key_may_be_named_as_people_write_it(letters: DeadLetters, config: str, named: str) -> None:
    letters.add([LETTER, replace(LETTER, key='{"id":11}')])
    assert "Deleted 1 dead letter(s)" in run("drop", "--config", config, "--key", named, "--yes")
    with pytest.raises(ConfigError, match="no dead letter"):
        run("retry", "--config", config, "--key", named)


def test_an_unknown_sink_is_named(config: str) -> None:
    with pytest.raises(ConfigError, match="no sink 'redis'"):
        run("list", "--config", config, "--sink", "redis")


def test_the_counts_of_a_pipeline_follow_its_files_at_once(tmp_path: Path) -> None:
    counts = DeadLetterCounts(tmp_path, ("redis", "lake"))
    assert counts.read() == {"redis": {}, "lake": {}}
    box = DeadLetters(tmp_path / "dead-letters" / "redis")
    for count in range(1, 20):
        box.add([replace(LETTER, key=f'{{"id":{count}}}')])
        assert counts.read()["redis"] == {LETTER.table: count}
    box.drop()
    assert counts.read() == {"redis": {}, "lake": {}}

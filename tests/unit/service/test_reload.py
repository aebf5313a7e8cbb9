"""What a changed pipeline file means for whom, and what is refused before anything is touched."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cdc.config.settings import Settings
from cdc.errors import ConfigError, EnvironmentFault
from cdc.service.daemon import reload
from cdc.service.daemon.reload import Plan, plan
from cdc.service.daemon.supervisor import StateLock

Make = Callable[..., Settings]
REDIS = {"kind": "redis"}


def changed(make: Make, before: dict[str, object], after: dict[str, object]) -> Plan:
    return plan(make(**before), make(**after))


def test_the_same_file_changes_nothing(settings_of: Make) -> None:
    assert changed(settings_of, {"sinks": [REDIS]}, {"sinks": [REDIS]}) == Plan()


def test_a_sink_concerns_apply_alone_and_is_not_a_restart(settings_of: Make) -> None:
    found = changed(settings_of, {"sinks": [REDIS]}, {"sinks": [REDIS, {"kind": "delta", "path": "/lake"}]})
    assert found == Plan(reload=frozenset({"apply"}), changes=("sink delta added",))


def test_a_sink_that_goes_keeps_its_place_and_the_outcome_says_so(settings_of: Make) -> None:
    found = changed(settings_of, {"sinks": [REDIS]}, {"sinks": []})
    assert found.changes[0].startswith("sink redis removed")
    assert "millrace log forget" in found.changes[0]


def test_a_sink_with_other_settings_is_changed(settings_of: Make) -> None:
    found = changed(settings_of, {"sinks": [REDIS]}, {"sinks": [{**REDIS, "trigger_seconds": 2}]})
    assert found == Plan(reload=frozenset({"apply"}), changes=("sink redis changed",))


def test_tables_are_told_to_both_parts(settings_of: Make) -> None:
    found = changed(settings_of, {"source": {"tables": ["a.b"]}}, {"source": {"tables": ["a.b", "a.c"]}})
    assert found == Plan(reload=frozenset({"capture", "apply"}), changes=("table a.c added",))


@pytest.mark.parametrize(
    ("section", "value", "parts"),
    [
        ("spark", {"memory": "2g"}, {"apply"}),
        ("log", {"retention_hours": 5}, {"capture", "apply"}),
        ("budgets", {"free_mb": 5}, {"capture"}),
        ("source", {"password": "another"}, {"capture", "apply"}),
        ("http", {"port": 9999}, set()),
    ],
)
def test_only_the_parts_concerned_start_again(
    settings_of: Make, section: str, value: dict[str, object], parts: set[str]
) -> None:
    found = changed(settings_of, {}, {section: value})
    assert found.restart == parts
    assert not found.reload
    assert found.changes == (f"{section}.{next(iter(value))} changed",)


def test_no_secret_is_in_the_words(settings_of: Make) -> None:
    found = changed(settings_of, {}, {"source": {"password": "correct-horse"}})
    assert "correct-horse" not in str(found)


@pytest.mark.parametrize("key", ["slot", "publication", "database"])
def test_what_would_lose_the_position_is_refused(settings_of: Make, key: str) -> None:
    with pytest.raises(ConfigError, match=f"source.{key} cannot change while the pipeline runs"):
        changed(settings_of, {}, {"source": {key: "another"}})


def test_what_is_captured_of_a_table_cannot_change_under_it(settings_of: Make) -> None:
    masked = {"name": "a.b", "mask": {"note": "hash"}}
    with pytest.raises(ConfigError, match=r"a\.b cannot change while the pipeline runs"):
        changed(settings_of, {"source": {"tables": ["a.b"]}}, {"source": {"tables": [masked]}})


def test_another_state_folder_or_log_is_refused(settings_of: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state, log\.kind cannot change"):
        changed(settings_of, {}, {"state": str(tmp_path / "other"), "log": {"kind": "kafka"}})


def test_a_reload_reaches_the_daemon_that_holds_the_folder(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    with pytest.raises(EnvironmentFault, match="No millrace runs"):
        reload.request(state_dir)
    with StateLock(state_dir):
        reload.request(state_dir)
    assert sent == [(os.getpid(), signal.SIGHUP)]
    with pytest.raises(EnvironmentFault, match="No millrace runs"):
        reload.request(state_dir)


@pytest.mark.usefixtures("copy_engine")
def test_a_view_concerns_its_process_and_the_sinks_and_leaves_its_rows(settings_of: Make) -> None:
    one = {"kind": "copied", "name": "one", "source": "a.b"}
    added = changed(settings_of, {}, {"views": [one]})
    assert added == Plan(reload=frozenset({"apply", "views"}), changes=("view one added",))
    removed = changed(settings_of, {"views": [one]}, {})
    assert removed.reload == {"apply"}
    assert "millrace view drop" in removed.changes[0]
    other = changed(settings_of, {"views": [one]}, {"views": [{**one, "source": "a.c"}]})
    assert other.changes == ("view one changed",)
    tables = changed(
        settings_of,
        {"views": [one], "source": {"tables": ["a.b"]}},
        {"views": [one], "source": {"tables": ["a.b", "a.c"]}},
    )
    assert "views" in tables.reload

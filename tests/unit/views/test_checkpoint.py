"""State in files: a crash at any moment leaves the checkpoint before or the one after."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.errors import LogCorrupt
from tests.unit.views.test_state import COLUMNS, found, put
from views.state import checkpoint
from views.state.table import StateTable


def _loaded(folder: Path) -> StateTable:
    return checkpoint.load_table(folder, "rows", COLUMNS)


def _saved(folder: Path, *rows: tuple[str, str, int | None]) -> StateTable:
    state = StateTable(COLUMNS)
    put(state, *rows)
    checkpoint.save(folder, {"rows": state}, {"offset": "1"})
    return state


def test_a_checkpoint_is_read_as_it_was_saved(tmp_path: Path) -> None:
    state = _saved(tmp_path, ("a", "1", 10), ("b", "2", 20))
    assert checkpoint.facts_of(tmp_path) == {"offset": "1"}
    assert found(_loaded(tmp_path), "a", "b") == found(state, "a", "b") == {"1": 10, "2": 20}


def test_a_table_of_which_nothing_is_stored_is_empty(tmp_path: Path) -> None:
    assert checkpoint.facts_of(tmp_path) is None
    assert _loaded(tmp_path).entries == 0
    checkpoint.save(tmp_path, {"rows": StateTable(COLUMNS)}, {})
    assert _loaded(tmp_path).entries == 0
    state = _saved(tmp_path, ("a", "1", 1))
    put(state, ("a", "1", None))
    checkpoint.save(tmp_path, {"rows": state}, {})
    assert found(_loaded(tmp_path), "a") == {}


def test_only_what_has_changed_is_written_and_files_of_former_checkpoints_are_removed(tmp_path: Path) -> None:
    state = _saved(tmp_path, *((str(number), "1", number) for number in range(100)))
    (first,) = tmp_path.glob("*.arrow")
    put(state, ("a", "1", 1))
    checkpoint.save(tmp_path, {"rows": state}, {"offset": "2"})
    assert first in tmp_path.glob("*.arrow")
    assert len(list(tmp_path.glob("*.arrow"))) == 2
    put(state, *((str(number), "1", -number) for number in range(100)))
    checkpoint.save(tmp_path, {"rows": state}, {"offset": "3"})
    assert len(list(tmp_path.glob("*.arrow"))) == 1
    assert found(_loaded(tmp_path), "7") == {"1": -7}


def test_files_that_no_manifest_names_are_harmless_and_the_next_checkpoint_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _saved(tmp_path, ("a", "1", 10))
    put(state, ("a", "1", 11))

    def crash(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "replace", crash)
        checkpoint.save(tmp_path, {"rows": state}, {"offset": "2"})
    assert len(list(tmp_path.glob("*.arrow"))) == 2
    assert checkpoint.facts_of(tmp_path) == {"offset": "1"}
    again = _loaded(tmp_path)
    assert found(again, "a") == {"1": 10}
    put(again, ("b", "2", 20))
    checkpoint.save(tmp_path, {"rows": again}, {"offset": "3"})
    assert found(_loaded(tmp_path), "a", "b") == {"1": 10, "2": 20}
    assert len(list(tmp_path.glob("*.arrow"))) == 1


def test_state_of_another_format_is_not_read(tmp_path: Path) -> None:
    _saved(tmp_path, ("a", "1", 10))
    body = json.loads((tmp_path / "manifest.json").read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps({**body, "format": 0}), encoding="utf-8")
    assert checkpoint.facts_of(tmp_path) is None
    assert _loaded(tmp_path).entries == 0


@pytest.mark.parametrize("damage", ["manifest", "missing", "cut", "columns"])
def test_a_damaged_checkpoint_is_an_error_that_names_the_file_and_the_remedy(tmp_path: Path, damage: str) -> None:
    _saved(tmp_path, ("a", "1", 10))
    (path,) = tmp_path.glob("*.arrow")
    columns = COLUMNS
    if damage == "manifest":
        path = tmp_path / "manifest.json"
        path.write_text("{", encoding="utf-8")
    elif damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        columns = pa.schema([("id", pa.string())])
    with pytest.raises(LogCorrupt, match=path.name) as failed:
        checkpoint.load_table(tmp_path, "rows", columns)
    assert "it is computed again" in failed.value.remedy

"""Files that are whole or not there at all."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cdc import durable_files


@pytest.mark.parametrize("replace", [durable_files.replace, durable_files.replace_unsynced])
def test_a_replaced_file_is_private_and_leaves_nothing_beside_it(
    replace: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    path = tmp_path / "facts.json"
    for data in (b"old", b"new"):
        replace(path, data)
        assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_in_the_place_of_a_replaced_file_stays_if_it_cannot_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        durable_files.replace_unsynced(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_created_file_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "key"
    durable_files.create(path, b"first", 0o640)
    with pytest.raises(FileExistsError):
        durable_files.create(path, b"second")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"first", 0o640)
    assert list(tmp_path.iterdir()) == [path]


def test_no_file_is_opened_through_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for action in (durable_files.open_new, durable_files.open_or_make, durable_files.open_existing):
        with pytest.raises(OSError, match=r"exists|symbolic"):
            action(link)
    assert not (tmp_path / "elsewhere").exists()

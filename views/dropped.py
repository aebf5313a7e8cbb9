"""Dropped views: their rows were removed from every store by a truncate. A small file in the view's folder says so.

The file outlives the view's entry in the pipeline file: sinks that receive every table still receive this truncate. A
dropped view that is in the pipeline file does not run until it is resumed.
"""

import time
from pathlib import Path

from cdc.config.settings import VIEW_SCHEMA
from cdc.durable_files import make_folder, remove, replace_unsynced
from cdc.model import TableId
from views.output_files import view_folder

_FILE, _MARK = "dropped", "mark"
_ASKED, _DONE = b"asked", b"done"
_SETTLE_SECONDS = 2.0
"""Until the processes have seen the file: they look about twice a second."""


def drop(state: Path, view: str) -> None:
    """Ask capture for the truncate. The view stays dropped until `restore`."""
    make_folder(view_folder(state, view))
    replace_unsynced(_path(state, view), _ASKED)


def restore(state: Path, view: str) -> bool:
    """Let the view run again, from the beginning; False if it was not dropped."""
    found = is_dropped(state, view)
    remove(_path(state, view))
    return found


def is_dropped(state: Path, view: str) -> bool:
    """Whether the view was dropped, even if the truncate is not in the log yet."""
    return _path(state, view).exists()


def is_due(state: Path, view: str) -> bool:
    """Whether capture is to append the truncate now."""
    path = _path(state, view)
    try:
        return path.read_bytes() == _ASKED and time.time() - path.stat().st_mtime >= _SETTLE_SECONDS
    except FileNotFoundError:
        return False


def is_done(state: Path, view: str) -> bool:
    """Whether the truncate is in the log."""
    return is_dropped(state, view) and _path(state, view).read_bytes() == _DONE


def done(state: Path, view: str) -> None:
    """The truncate is in the log."""
    replace_unsynced(_path(state, view), _DONE)


def dropped_tables(state: Path) -> frozenset[TableId]:
    """The tables of all dropped views."""
    return frozenset(TableId(VIEW_SCHEMA, path.parent.name) for path in (state / "views").glob(f"*/{_FILE}"))


def remove_state(state: Path, view: str) -> None:
    """Remove everything that a dropped view has computed. It must not run any more."""
    for path in view_folder(state, view).iterdir():
        if path.name not in (_FILE, _MARK):
            remove(path)


def _path(state: Path, view: str) -> Path:
    return view_folder(state, view) / _FILE

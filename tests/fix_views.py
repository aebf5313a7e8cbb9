"""A kind of view that copies a table, and its engine, planted in this process and in those that a test starts."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import cdc.service.views
import views.kinds
from cdc.service.views.view_run import OpenView

HERE = Path(__file__).parent / "view_engine"
ENVIRONMENT: Mapping[str, str] = {"PYTHONPATH": f"{HERE}:{Path(__file__).parents[1]}"}
"""For a child process: the same there."""
_MODULES = ("cdc.service.views.engine", "views.kinds.copied")


@pytest.fixture
def copy_engine() -> Iterator[Callable[[], OpenView]]:
    """Plants both; the value gives the engine."""
    folders = ((cdc.service.views.__path__, "service"), (views.kinds.__path__, "kinds"))
    saved = {name: sys.modules.pop(name, None) for name in _MODULES}
    for path, folder in folders:
        path.insert(0, str(HERE / folder))
    importlib.invalidate_caches()
    yield lambda: importlib.import_module("cdc.service.views.engine").open_view
    for path, folder in folders:
        path.remove(str(HERE / folder))
    for name, module in saved.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module

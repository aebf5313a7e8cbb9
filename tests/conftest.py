"""Fixtures come from the fix_*.py files beside this one."""

import os
import signal
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read by numpy's import: its idle threads spin

import hypothesis
import pytest

from tests import durations

pytest_plugins = ["tests.skips", *(f"tests.{path.stem}" for path in sorted(Path(__file__).parent.glob("fix_*.py")))]
# they import one another: marked first, none is imported without its assertions rewritten
pytest.register_assert_rewrite(*pytest_plugins)

# No test asserts a time: machines are shared. In CI the examples are the same in every run.
hypothesis.settings.register_profile("millrace", deadline=None, derandomize="CI" in os.environ, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000)  # make soak-tests
hypothesis.settings.load_profile("millrace")

# A shell has its background jobs ignore Ctrl-C, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest begin first, so that no worker is left with one of them at the end."""
    known = durations.kept()
    items.sort(key=lambda item: -known.get(durations.file_of(item.nodeid), 0))

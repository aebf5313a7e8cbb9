"""Fixtures around a whole pipeline's settings."""

from collections.abc import Callable
from pathlib import Path

import pytest

import cdc.log
from cdc.config import Settings
from cdc.pipeline_file import check
from sinks import registry


@pytest.fixture
def settings_of(state_dir: Path) -> Callable[..., Settings]:
    """Makes checked settings from plain sections, with this test's state folder."""

    def make(**sections: object) -> Settings:
        data = {"state": str(state_dir), **sections}
        return check(data, cdc.log.settings_kinds(), registry.settings_kinds(), "the test's settings")

    return make

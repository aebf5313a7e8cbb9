"""Kinds of sink are found by looking."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sinks
from cdc.config.settings import SinkSettings
from cdc.errors import ConfigError
from sinks import registry
from sinks.context import SinkContext

FILE = """
from typing import Literal
from cdc.config.settings import SinkSettings

class Own(SinkSettings):
    kind: Literal["{kind}"] = "{kind}"

SETTINGS = Own

def open_sink(settings, context):
    return settings.name
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    sinks.__path__.append(str(tmp_path))
    yield tmp_path
    sinks.__path__.remove(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("sinks.planted")]:
        del sys.modules[name]


def test_a_new_file_is_a_new_kind(folder: Path) -> None:
    (folder / "planted_one.py").write_text(FILE.format(kind="planted"))
    settings = registry.settings_kinds()["planted"].model_validate({"kind": "planted"})
    assert registry.open_sink(settings, SinkContext(folder)) == "planted"  # type: ignore[comparison-overlap]


def test_two_files_with_one_kind_are_refused(folder: Path) -> None:
    (folder / "planted_two.py").write_text(FILE.format(kind="redis"))
    with pytest.raises(ConfigError, match="Two modules in sinks/ define the kind 'redis'"):
        registry.settings_kinds()


def test_an_unknown_kind_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown kind 'nosuch'\..*redis"):
        registry.open_sink(SinkSettings(kind="nosuch"), SinkContext(tmp_path))


def test_looking_for_kinds_does_not_start_spark() -> None:
    code = "import sys; from sinks import registry; registry.settings_kinds(); print('pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"

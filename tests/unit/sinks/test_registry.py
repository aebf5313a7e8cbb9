"""Kinds of sink are found by looking."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sinks
from cdc.config.settings import SinkSettings
from cdc.errors import ConfigError
from cdc.log import registry as log_registry
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
    (folder / "planted.py").write_text(FILE.format(kind="planted"))
    settings = registry.settings_kinds()["planted"].model_validate({"kind": "planted"})
    assert registry.open_sink(settings, SinkContext(folder)) == "planted"  # type: ignore[comparison-overlap]


def test_a_kind_is_named_as_its_module() -> None:
    every = {**registry.settings_kinds(), **log_registry.settings_kinds()}
    assert {kind: settings.model_fields["kind"].default for kind, settings in every.items()} == {
        kind: kind for kind in every
    }


def test_an_unknown_kind_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown kind 'nosuch'\..*redis"):
        registry.open_sink(SinkSettings(kind="nosuch"), SinkContext(tmp_path))


def test_the_settings_of_all_kinds_import_neither_spark_nor_the_client_of_a_store() -> None:
    code = "import sys; from sinks import registry; dict(registry.settings_kinds()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert {"sinks.delta.settings", "sinks.memory"} <= set(done.stdout.split())
    assert {"pyspark", "deltalake", "opensearchpy", "redis.client"}.isdisjoint(done.stdout.split())

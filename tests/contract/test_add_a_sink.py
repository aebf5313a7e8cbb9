"""docs/add-a-sink.md is true: the file it shows is found, and keeps every promise."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sinks
from cdc.model import TableSchema
from cdc.ports import Sink
from sinks import registry
from sinks.context import SinkContext
from tests.contract import test_sinks as suite
from tests.contract.sinks import BENCHES

PAGE = Path(__file__).parents[2] / "docs" / "add-a-sink.md"


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The page's code as a file of the package."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code
    folder = tmp_path_factory.mktemp("sinks")
    (folder / "jsonlines.py").write_text(code[1], encoding="utf-8")
    sinks.__path__.append(str(folder))
    importlib.invalidate_caches()
    yield importlib.import_module("sinks.jsonlines")
    sinks.__path__.remove(str(folder))
    del sys.modules["sinks.jsonlines"]


class PageBench:
    """The bench that the page asks for."""

    def __init__(self, module: Any, folder: Path) -> None:
        self._settings = module.JsonLinesSettings(folder=folder)

    def open(self) -> Any:
        return registry.open_sink(self._settings, SinkContext(Path("unused")))

    def restart(self) -> None:
        """Files have no server."""

    def versions(self, schema: TableSchema) -> dict[str, int]:
        return {key: line["version"] for key, line in self.open()._read(schema.table).items()}

    def lose(self, schema: TableSchema, key: str) -> None:
        sink = self.open()
        lines = sink._read(schema.table)
        del lines[key]
        sink._write(schema.table, lines)

    def drop(self, schema: TableSchema) -> None:
        self.open()._path(schema.table).unlink()


@pytest.fixture
def bench(module: ModuleType, tmp_path: Path) -> PageBench:
    return PageBench(module, tmp_path / "lines")


@pytest.fixture
def sink(bench: PageBench) -> Iterator[Sink]:
    opened: Sink = bench.open()
    opened.prepare(suite.ITEMS)
    yield opened
    opened.close()


PROMISES = [test for name, test in vars(suite).items() if name.startswith("test_") and "every_kind" not in name]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda test: test.__name__.removeprefix("test_"))
def test_the_sink_of_the_page_keeps_its_promise(promise: Callable[..., None], bench: PageBench, sink: Sink) -> None:
    asked = promise.__code__.co_varnames[: promise.__code__.co_argcount]
    given: dict[str, object] = {"bench": bench, "sink": sink, "seed": 1, "keyed": "odd-texts"}
    promise(**{name: given[name] for name in asked})


def test_the_page_names_files_that_exist(module: ModuleType) -> None:
    assert "jsonlines" in registry.settings_kinds()
    assert set(BENCHES)
    named = re.findall(r"`((?:tests|sinks|docs|cdc)/[\w/.]+\.py)`", PAGE.read_text(encoding="utf-8"))
    root = PAGE.parents[1]
    assert [name for name in named if not (root / name).exists() and name != "sinks/jsonlines.py"] == []

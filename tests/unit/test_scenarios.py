"""docs/scenarios.md names a test for each scenario; this holds it to its word."""

import ast
import re
from functools import cache
from pathlib import Path

_TESTS = Path(__file__).parent.parent
_PAGE = _TESTS.parent / "docs" / "scenarios.md"
_ROW = re.compile(r"^\| (S?\d+) \| .+? \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def _rows() -> list[tuple[str, str]]:
    return [(found[1], found[2]) for found in _ROW.finditer(_PAGE.read_text())]


@cache
def _tests_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_scenario_has_one_line() -> None:
    wanted = [str(number) for number in range(1, 164)] + [f"S{number}" for number in range(1, 21)]
    assert [number for number, _ in _rows()] == wanted


def test_every_scenario_names_a_test_or_says_that_it_has_none() -> None:
    assert [number for number, named in _rows() if not _TEST.search(named) and "**missing**" not in named] == []


def test_every_test_that_is_named_exists() -> None:
    named = {found for _, cell in _rows() for found in _TEST.findall(cell)}
    lost = [f"{file}::{name}" for file, name in named if not (_TESTS / file).is_file()]
    lost += [
        f"{file}::{name}" for file, name in named if (_TESTS / file).is_file() and name not in _tests_in(_TESTS / file)
    ]
    assert sorted(lost) == []


def test_nothing_else_stands_where_tests_are_named() -> None:
    left = {number: _TEST.sub("", cell).replace(",", "").strip() for number, cell in _rows()}
    assert {number: text for number, text in left.items() if text and "**missing**" not in text} == {}

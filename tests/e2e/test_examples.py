"""Every example runs with one command, shows what its steps say, and ends with a store that equals the tables."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from deploy.examples.example import examples
from deploy.local.servers import Servers
from tests.fix_processes import RunProgram

pytestmark = pytest.mark.spark

SHOWN: Mapping[str, Mapping[str, Sequence[str]]] = {
    "order_documents": {
        "An item of order 3 comes before the order": ["  */1  unchanged", "  */2  unchanged"],
        "Order 3 comes": ["  */1  unchanged", "  */2  unchanged", '+ */3 *"items": ?{"id": 31,*'],
        "Ada moves to Chania": ['~ */1 *"city": "Chania"*', "  */2  unchanged", '~ */3 *"city": "Chania"*'],
        "The desk lamp gets a new price": ['~ */1 *"price": 34.9*', "  */2  unchanged", '~ */3 *"price": 34.9*'],
        "The desk moves": ['~ */1 *"items": ?{"id": 11,*', '~ */2 *"items": ?{"id": 12,*', "  */3  unchanged"],
        "Order 3 is deleted": ["  */1  unchanged", "  */2  unchanged", "- */3"],
        "Which orders contain a lamp?": ['+ */1 *"title": "desk lamp"*'],
    },
    "revenue_per_minute": {
        "The first order of minute 10:01": [
            "  *3A00%3A00Z:north  unchanged",
            "  *3A00%3A00Z:south  unchanged",
            '+ *3A01%3A00Z:north *"revenue":7.00,"late":0,"final":false*',
        ],
        "An order of 10:00:50": [
            "  *3A00%3A00Z:north  unchanged",
            '~ *3A00%3A00Z:south *"revenue":110.00,"late":0,"final":false*',
            "  *3A01%3A00Z:north  unchanged",
        ],
        "An order of 10:01:30": [
            '~ *3A00%3A00Z:north *"revenue":32.50,"late":0,"final":true,"watermark":"2026-03-02T10:01:00Z"*',
            '~ *3A00%3A00Z:south *"revenue":110.00,"late":0,"final":true,"watermark":"2026-03-02T10:01:00Z"*',
            "  *3A01%3A00Z:north  unchanged",
            '+ *3A01%3A00Z:south *"revenue":5.00,"late":0,"final":false*',
        ],
        "A till was offline": [
            '~ *3A00%3A00Z:north *"revenue":72.50,"late":1,"final":true*',
            "  *3A00%3A00Z:south  unchanged",
            "  *3A01%3A00Z:north  unchanged",
            "  *3A01%3A00Z:south  unchanged",
        ],
    },
    "timelines": {
        "Ada posts": [
            "  *:cleo:1  unchanged",
            "  *:cleo:2  unchanged",
            '+ *:cleo:3 *"body":"The mill turns"*',
            "  *:dan:1  unchanged",
            '+ *:dan:3 *"body":"The mill turns"*',
        ],
        "Cleo unfollows Ada": [
            "  *:cleo:2  unchanged",
            *(f"  *:dan:{post}  unchanged" for post in (1, 2, 3)),
            "- *:cleo:1",
            "- *:cleo:3",
        ],
    },
}
"""By example and by the beginning of a step's sentence: patterns of the lines below it."""


@pytest.fixture(scope="module")
def home(session_home: Path) -> Iterator[Path]:
    """A place for the examples' servers that their user can reach."""
    place = session_home / "examples"
    yield place
    Servers(place).down()


@pytest.mark.parametrize("name", examples())
def test_an_example_shows_what_its_steps_say_and_ends_equal(name: str, home: Path, run_program: RunProgram) -> None:
    example = run_program("-m", "cdc.cli.main", "example", name, env={"MILLRACE_HOME": str(home)})
    assert example.wait(200) == 0, example.said()[-5000:]
    said = example.said()
    for beginning, patterns in SHOWN[name].items():
        lines = _lines_below(beginning, said)
        assert len(lines) == len(patterns), said
        assert [line for line, one in zip(lines, patterns, strict=True) if not fnmatchcase(line, f"  {one}")] == []
    assert "all equal" in said
    assert "DIFFER" not in said
    assert Servers(home).status() == {}


def test_the_examples_are_listed(run_program: RunProgram) -> None:
    program = run_program("-m", "cdc.cli.main", "example")
    assert program.wait(60) == 0, program.said()
    assert [one.title for one in examples().values() if one.title not in program.said()] == []


def _lines_below(beginning: str, said: str) -> list[str]:
    """The lines up to the next sentence."""
    return said.partition(f"\n{beginning}")[2].partition("\n\n")[0].splitlines()[1:]

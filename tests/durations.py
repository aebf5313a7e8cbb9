"""How long each test file took: a table after every `make test`, and tests/durations.json, which orders the next run.

`python -m tests.durations build/tests.xml` writes build/durations.txt, and with `--keep` also tests/durations.json.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

_KEPT = Path(__file__).with_suffix(".json")
_LONGEST = 40


def kept() -> dict[str, int]:
    """Seconds by file. A file without any counts as short."""
    found: dict[str, int] = json.loads(_KEPT.read_text(encoding="utf-8"))
    return found


def file_of(nodeid: str) -> str:
    """The file that a test lies in."""
    return nodeid.partition("::")[0]


def table(report: Path) -> str:
    """Every file of a JUnit report, then its longest tests, the longest first."""
    tests, files = _seconds(report)
    lines = [f"{sum(files.values()):8.1f} s in {len(tests)} tests of {len(files)} files", ""]
    lines += [f"{taken:8.1f} s  {file}" for file, taken in _longest(files)]
    lines += ["", f"The {_LONGEST} longest tests", ""]
    lines += [f"{taken:8.1f} s  {test}" for test, taken in _longest(tests)[:_LONGEST]]
    return "\n".join(lines) + "\n"


def keep(report: Path) -> None:
    """Every file that took at least a second."""
    _, files = _seconds(report)
    whole = {file: round(taken) for file, taken in _longest(files) if taken >= 1}
    _KEPT.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _longest(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda one: -one[1])


def _seconds(report: Path) -> tuple[dict[str, float], dict[str, float]]:
    """By test and by file."""
    tests: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iterfind(".//testcase[@classname]"):
        module = [part for part in case.attrib["classname"].split(".") if not part.startswith("Test")]
        file = "/".join(module) + ".py"
        tests[f"{file}::{case.attrib['name']}"] += float(case.attrib["time"])
        files[file] += float(case.attrib["time"])
    return tests, files


def main() -> None:
    """Write the table, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--keep", action="store_true")
    chosen = parser.parse_args()
    chosen.report.with_name("durations.txt").write_text(table(chosen.report), encoding="utf-8")
    if chosen.keep:
        keep(chosen.report)


if __name__ == "__main__":
    main()

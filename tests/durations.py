"""How long each test file takes, kept in tests/durations.json: `make test-durations` writes it after a `make test`."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

_KEPT = Path(__file__).with_suffix(".json")


def kept() -> dict[str, int]:
    """Seconds by file. A file without any counts as short."""
    found: dict[str, int] = json.loads(_KEPT.read_text(encoding="utf-8"))
    return found


def file_of(nodeid: str) -> str:
    """The file that a test lies in."""
    return nodeid.partition("::")[0]


def keep(report: Path) -> None:
    """Seconds of every file in a JUnit report that take at least one."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iterfind(".//testcase[@classname]"):
        seconds[case.attrib["classname"].replace(".", "/") + ".py"] += float(case.attrib["time"])
    longest = sorted(seconds.items(), key=lambda one: -one[1])
    whole = {file: round(taken) for file, taken in longest if taken >= 1}
    _KEPT.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    keep(Path(sys.argv[1]))

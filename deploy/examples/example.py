"""An example, as its folder describes it.

`millrace.yaml` is the pipeline, `tables.sql` what is there before it starts, `changes.sql` the steps after that: each
begins with a line `-- Step: <sentence>`. Optional: `expected.sql`, a query that the view must be equal to in the end,
and `search.yaml`, a search in OpenSearch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from cdc.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "examples"
_STEP = re.compile(r"^-- Step: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Step:
    """Changes of the tables, and what follows from them as one sentence."""

    sentence: str
    sql: str


@dataclass(frozen=True, slots=True)
class Search:
    """A search in an index, by the body that OpenSearch gets."""

    sentence: str
    index: str
    query: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Example:
    """One example. Its database has the name of its folder."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def config(self) -> Path:
        """The pipeline file."""
        return self.folder / "millrace.yaml"

    @property
    def title(self) -> str:
        """What it shows, as one sentence: the first comment of its pipeline file."""
        return self._text("millrace.yaml").partition("\n")[0].removeprefix("# ")

    @property
    def stores(self) -> set[str]:
        """The kinds of its sinks, which are also the names of the servers that it needs beside Postgres."""
        return {str(sink["kind"]) for sink in yaml.safe_load(self._text("millrace.yaml"))["sinks"]}

    @property
    def tables(self) -> str:
        """SQL that creates the tables with their first rows."""
        return self._text("tables.sql")

    @property
    def steps(self) -> list[Step]:
        """The changes, in order."""
        _, *found = _STEP.split(self._text("changes.sql"))
        return [Step(sentence, sql) for sentence, sql in zip(found[::2], found[1::2], strict=True)]

    @property
    def expected(self) -> str:
        """A query of the rows that the view must have in the end, or only some of their columns; may be empty."""
        return self._text("expected.sql")

    @property
    def search(self) -> Search | None:
        """The search at the end."""
        text = self._text("search.yaml")
        return Search(**yaml.safe_load(text)) if text else None

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""


def examples() -> dict[str, Example]:
    """Every example by its name. Raises ConfigError without a source tree: packages leave the examples out."""
    found = {path.parent.name: Example(path.parent) for path in sorted(FOLDER.glob("*/millrace.yaml"))}
    if not found:
        raise ConfigError("The examples are not installed.", "They are in the folder `examples` of the source tree.")
    return found


def named(name: str) -> Example:
    """The example of that name. Raises ConfigError."""
    found = examples()
    if name not in found:
        raise ConfigError(f"There is no example `{name}`.", f"Choose from {', '.join(found)}.")
    return found[name]

"""Which chunks of which tables the initial snapshot reads, and which of them are done. Pure, restored from marks.

A table is split into page ranges, so that any number of workers read it in parallel without an index, and a crash
loses one range. A partitioned table is one table whose ranges are those of its leaves.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cdc.model import TableId

LEAST_PAGES = 1024
"""8 MB: for less, starting a query costs more than a second worker saves."""
MOST_CHUNKS = 1000
"""Per table. The mark is written with every chunk, and a list of 100,000 chunks would be larger than small chunks."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A relation with its own pages. `filenode` changes when it is rewritten (VACUUM FULL, TRUNCATE)."""

    name: TableId
    filenode: int
    pages: int
    whole: bool = False
    """Read as one chunk through the root: the server has no ctid range scans, or the role may not read the leaf."""


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Pages `first` up to but not including `end` of one leaf; `end` None: to its end, with pages added since."""

    number: int
    leaf: Leaf
    first: int = 0
    end: int | None = None


@dataclass(frozen=True, slots=True)
class TablePlan:
    """How one table is read, and its progress; kept as the table's mark in the log."""

    table: TableId
    leaves: tuple[Leaf, ...]
    step: int
    done: frozenset[int] = frozenset()
    rows: int = 0

    @property
    def chunks(self) -> tuple[PlannedChunk, ...]:
        """Every chunk in page order: the same for the same leaves and step, also after a crash."""
        ranges = [(leaf, first, end) for leaf in self.leaves for first, end in _ranges(leaf, self.step)]
        return tuple(PlannedChunk(number, leaf, first, end) for number, (leaf, first, end) in enumerate(ranges))

    @property
    def remaining(self) -> tuple[PlannedChunk, ...]:
        """The chunks that are not done."""
        return tuple(chunk for chunk in self.chunks if chunk.number not in self.done)

    @property
    def finished(self) -> bool:
        """Whether every row of the table is in the log."""
        return not self.remaining

    def advanced(self, rows: int, done: int | None = None) -> Self:
        """The plan after `rows` more rows, and with chunk `done` done."""
        finished = self.done if done is None else self.done | {done}
        return type(self)(self.table, self.leaves, self.step, finished, self.rows + rows)

    def mark(self) -> str:
        """The text of the log's mark. It differs after every advance, so no entry that has it is taken for a
        repetition."""
        leaves = [[leaf.name.schema, leaf.name.name, leaf.filenode, leaf.pages, leaf.whole] for leaf in self.leaves]
        body = {"step": self.step, "rows": self.rows, "done": _runs(self.done), "leaves": leaves}
        return json.dumps(body, separators=(",", ":"))

    @classmethod
    def parse(cls, table: TableId, mark: str) -> Self:
        """Parse a mark."""
        body = json.loads(mark)
        leaves = tuple(Leaf(TableId(s, n), filenode, pages, whole) for s, n, filenode, pages, whole in body["leaves"])
        done = frozenset(number for first, last in body["done"] for number in range(first, last + 1))
        return cls(table, leaves, body["step"], done, body["rows"])


def mark_name(table: TableId) -> str:
    """The name of a table's mark."""
    return f"snapshot:{table}"


def plan_table(table: TableId, leaves: Sequence[Leaf], workers: int) -> TablePlan:
    """Split a table so that every worker has several chunks, none is tiny and there are not too many."""
    pages = sum(leaf.pages for leaf in leaves)
    fair = -(-pages // (workers * 8))
    return TablePlan(table, tuple(leaves), max(LEAST_PAGES, fair if pages < 2**20 else -(-pages // MOST_CHUNKS)))


def planned(marks: Mapping[str, str], tables: Iterable[TableId]) -> dict[TableId, TablePlan]:
    """The plans of these tables in the log's marks."""
    return {table: TablePlan.parse(table, marks[mark_name(table)]) for table in tables if mark_name(table) in marks}


def largest_first(plans: Iterable[TablePlan]) -> list[tuple[TableId, PlannedChunk]]:
    """All remaining chunks, the largest table's first, so that all workers finish at about the same time."""
    order = sorted(plans, key=lambda plan: -sum(leaf.pages for leaf in plan.leaves))
    return [(plan.table, chunk) for plan in order for chunk in plan.remaining]


def _ranges(leaf: Leaf, step: int) -> list[tuple[int, int | None]]:
    if leaf.whole or leaf.pages <= step:
        return [(0, None)]
    starts = list(range(0, leaf.pages, step))
    return [(first, first + step) for first in starts[:-1]] + [(starts[-1], None)]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs

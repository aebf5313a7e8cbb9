"""A view's steps, in the order in which a batch passes them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from cdc.model import TableId
from views.dataflow.changes import InputTable
from views.dataflow.delta import delta_schema
from views.dataflow.events import Events
from views.dataflow.output import OUTPUT, Output
from views.state.table import StateTable

Step = Callable[..., pa.Table]
"""Moves on by one batch: one delta per source in, the delta of its result out."""


@dataclass(frozen=True, slots=True)
class Node:
    """A step and where its deltas come from: numbers of inputs and of earlier nodes, inputs first."""

    name: str
    step: Step
    sources: tuple[int, ...]
    text: str
    """What it does, for `millrace view explain`; empty: nothing that a reader needs to know."""
    state: Mapping[str, StateTable] = field(default_factory=dict)
    """What the step keeps between batches, by names that stay the same."""


@dataclass(frozen=True, slots=True)
class Care:
    """What a view does between batches."""

    forget: Callable[[], None] = lambda: None
    """Removes state that no change can concern any more."""
    facts: Callable[[], Mapping[str, object]] = dict
    """What the status shows of it besides."""


class Graph:
    """The steps of one view."""

    def __init__(
        self,
        inputs: Sequence[InputTable],
        nodes: Sequence[Node],
        output: Output,
        care: "Care | None" = None,
    ) -> None:
        self.care = care or Care()
        self.inputs = tuple(inputs)
        self.nodes = tuple(nodes)
        self.output = output

    @property
    def tables(self) -> Mapping[str, StateTable]:
        """Every table of the state by its name."""
        found = {f"input {each.table}{name}": table for each in self.inputs for name, table in each.states.items()}
        for node in self.nodes:
            found |= {f"{node.name} {name}": table for name, table in node.state.items()}
        return {**found, **{f"output {name}": table for name, table in self.output.tables.items()}}

    @property
    def timed(self) -> bool:
        """Whether time passes for the view also where nothing changes."""
        return any(isinstance(each, Events) for each in self.inputs)

    def begin(self, exact_from: int, reached: int) -> None:
        """Before a step: the LSN from which the log is exact, and the LSN that the step reaches."""
        for each in self.inputs:
            if isinstance(each, Events):
                each.exact_from, each.loading = exact_from, reached < exact_from

    def step(self, rows: pa.Table) -> pa.Table:
        """The net delta of the view that follows from these changes of the log, which are whole transactions."""
        deltas = [each.step(_of(rows, each.tables)) for each in self.inputs]
        if not self.timed and not any(delta.num_rows for delta in deltas):
            return delta_schema(OUTPUT).empty_table()
        for node in self.nodes:
            deltas.append(node.step(*(deltas[source] for source in node.sources)))
        return self.output.step(deltas[-1])


class GraphBuilder:
    """Collects the steps of a graph. Numbers are those of `Node.sources`."""

    def __init__(self, inputs: Iterable[InputTable]) -> None:
        self._inputs = list(inputs)
        self._nodes: list[Node] = []

    def input(self, table: TableId) -> int:
        """The number of a captured table's changes."""
        return [each.table for each in self._inputs].index(table)

    def add(
        self,
        name: str,
        step: Step,
        sources: Iterable[int],
        text: str = "",
        state: Mapping[str, StateTable] | None = None,
    ) -> int:
        """Add a step; returns its number. State is found by the name: it must stay the same from start to start."""
        self._nodes.append(Node(name, step, tuple(sources), text, state or {}))
        return len(self._inputs) + len(self._nodes) - 1

    def built(self, output: Output, care: "Care | None" = None) -> Graph:
        """The graph; the last step gives the rows of the view."""
        return Graph(self._inputs, self._nodes, output, care)


def _of(rows: pa.Table, tables: Sequence[str]) -> pa.Table:
    return rows.filter(pc.is_in(rows.column("table"), value_set=pa.array(tables)))

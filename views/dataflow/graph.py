"""A view's steps, in the order in which a batch passes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from views.dataflow.changes import TableChanges
from views.dataflow.delta import delta_schema
from views.dataflow.events import Events
from views.dataflow.output import OUTPUT, Output
from views.state.table import StateTable


class Step(Protocol):
    """A step: deltas in, the delta of its result out. A step with state has `tables`, by a name that stays the same."""

    def step(self, *deltas: pa.Table) -> pa.Table:
        """Move on by one batch."""


@dataclass(frozen=True, slots=True)
class Node:
    """A step and where its deltas come from: numbers of inputs and of earlier nodes, inputs first."""

    name: str
    step: Step
    sources: tuple[int, ...]
    text: str
    """What it does, for `millrace view explain`."""


class Graph:
    """The steps of one view."""

    def __init__(self, inputs: Sequence[TableChanges], nodes: Sequence[Node], output: Output) -> None:
        self.inputs = tuple(inputs)
        self.nodes = tuple(nodes)
        self.output = output

    @property
    def tables(self) -> Mapping[str, StateTable]:
        """Every table of the state by its name."""
        found = {f"input {each.table}{name}": table for each in self.inputs for name, table in each.states.items()}
        for node in self.nodes:
            for name, table in getattr(node.step, "tables", {}).items():
                found[f"{node.name} {name}"] = table
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

    def restore(self, tables: Mapping[str, StateTable]) -> None:
        """Continue with stored state."""
        for name, table in self.tables.items():
            table.stored(tables[name].runs)

    def step(self, rows: pa.Table) -> pa.Table:
        """The net delta of the view that follows from these changes of the log, which are whole transactions."""
        deltas = [each.step(_of(rows, each.tables)) for each in self.inputs]
        if not self.timed and not any(delta.num_rows for delta in deltas):
            return delta_schema(OUTPUT).empty_table()
        for node in self.nodes:
            deltas.append(node.step.step(*(deltas[source] for source in node.sources)))
        return self.output.step(deltas[-1])


def _of(rows: pa.Table, tables: Sequence[str]) -> pa.Table:
    return rows.filter(pc.is_in(rows.column("table"), value_set=pa.array(tables)))

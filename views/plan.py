"""The plan of a view: what it reads, how it is computed, what its rows are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cdc.model import TableId, TableSchema
from views.dataflow.graph import Graph


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked view."""

    name: str
    columns: Mapping[TableId, tuple[str, ...]]
    """The columns that it needs of each captured table."""
    schema: TableSchema
    """The rows of the view; their key columns are flagged."""
    graph: Callable[[], Graph]
    """Makes the steps, without state."""
    referee: str
    """SQL for DuckDB that computes the whole view from the captured tables, as `_id` and `_json`, to compare with."""
    definition: str
    """A text that is the same as long as the view computes the same: state of another definition is not used."""

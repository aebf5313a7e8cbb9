"""The plan of a view: what it reads, how it is computed, what its rows are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from cdc.model import TableId, TableSchema
from views.dataflow.graph import Graph


@dataclass(frozen=True, slots=True)
class ViewPlan:
    """A checked view."""

    name: str
    columns: Mapping[TableId, tuple[str, ...]]
    """The columns that it needs of each captured table."""
    schema: TableSchema
    """The rows of the view; their key columns are flagged."""
    graph: Callable[[], Graph]
    """Makes the steps, without state."""
    referee: Callable[[Mapping[TableId, pa.Table]], pa.Table] | None
    """Computes the whole view at once from the captured tables, to compare with: ID and ROW of every row. The tables
    have `_id` (the row's key) and the needed columns as cells. None: the view depends on the order of the log too."""
    definition: str
    """A text that is the same as long as the view computes the same: state of another definition is not used."""

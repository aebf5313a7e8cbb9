"""The plan of a view: what it reads, how it is computed, what its rows are."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from cdc.errors import ConfigError
from cdc.model import TableId, TableSchema
from views.dataflow.graph import Graph

_RESERVED = re.compile(
    "_(id|sign|key|row|live|json|parent|order|order_text|item|list|far|join|group|count|doc|text|outer[0-9]+|member[0-9]+)"
)
"""Names of columns that the steps add to the rows."""


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

    def __post_init__(self) -> None:
        """Raise ConfigError for a column that has the name of one of our own."""
        needed = {str(table): names for table, names in self.columns.items()}
        for table, names in {**needed, "its result": [column.name for column in self.schema.columns]}.items():
            for name in filter(_RESERVED.fullmatch, names):
                raise ConfigError(
                    f"view {self.name}: column {name} of {table} has a name that views use themselves.",
                    "Leave it out, or give it another name.",
                )

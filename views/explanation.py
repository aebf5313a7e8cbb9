"""A plan in words, for people."""

from collections.abc import Iterator

from cdc.model import Column
from views.plan import ViewPlan


def describe(plan: ViewPlan) -> Iterator[str]:
    """What the view reads and what its rows are, line by line."""
    for table, columns in sorted(plan.columns.items()):
        yield f"reads {table}: {', '.join(columns)}"
    key = ", ".join(column.name for column in plan.schema.key)
    yield f"one row for each: {key}"
    for column in plan.schema.columns:
        yield f"column {_column(column)}"
    yield f"definition {plan.definition}"


def _column(column: Column) -> str:
    return f"{column.name} {column.type.name}{', key' if column.key else ''}"

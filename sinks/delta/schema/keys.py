"""What must be true of a table's key before its rows are written."""

from collections.abc import Sequence

from cdc.errors import SinkError
from cdc.model import TableSchema
from sinks.delta.rows.changes import TypedChanges


def check_keys(schema: TableSchema, wanted: Sequence[str] | None) -> None:
    """Raise SinkError where the settings expect another key."""
    known = [column.name for column in schema.key]
    if wanted is not None and sorted(wanted) != sorted(known):
        raise SinkError(
            f"table {schema.table}: `keys` asks for ({', '.join(wanted)}), but its key in the source is "
            f"({', '.join(known)}).",
            "Correct `keys`, or change the table's primary key or replica identity: a delete has no other columns.",
        )


def refuse_null_keys(given: TypedChanges) -> None:
    """Raise SinkError where a table that was created with a key gets rows without one: no look-up would find them."""
    if any(given.rows[name].null_count for name in given.layout.key):
        table = given.layout.table
        raise SinkError(
            f"table {table} has lost its key, and its Delta table was created with one.",
            "Give it a primary key again, or start the table over: remove its folder and its note below delta/ in the "
            f"state folder, then: millrace backfill {table}",
        )

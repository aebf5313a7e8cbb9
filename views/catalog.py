"""What views are checked against: the captured tables' schemas and the foreign keys between them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from cdc.errors import ConfigError, ViewWaits
from cdc.model import Column, ForeignKey, TableId, TableSchema


@dataclass(frozen=True, slots=True)
class Catalog:
    """Schemas by table, and foreign keys."""

    schemas: Mapping[TableId, TableSchema]
    foreign_keys: tuple[ForeignKey, ...] = ()
    expected: frozenset[TableId] = frozenset()
    """Tables that are to be captured, also those whose schema is not known yet."""

    def schema(self, table: TableId, place: str) -> TableSchema:
        """The schema of a captured table. Raises ConfigError, which names the place; ViewWaits if the table is to be
        captured, and capture has not described it yet."""
        found = self.schemas.get(table)
        if found is None and table in self.expected:
            raise ViewWaits(f"{place}: table {table} is not in the log yet.", "It is there once capture has started.")
        if found is None:
            raise ConfigError(
                f"{place}: table {table} is not captured{_near(str(table), map(str, self.schemas))}",
                "Add it to source.tables, or correct its name.",
            )
        return found

    def column(self, table: TableId, name: str, place: str) -> Column:
        """A column of a captured table. Raises ConfigError, which names the place."""
        schema = self.schema(table, place)
        found = next((column for column in schema.columns if column.name == name), None)
        if found is None:
            known = [column.name for column in schema.columns]
            raise ConfigError(
                f"{place}: {table} has no column {name}{_near(name, known)}", f"Its columns: {', '.join(known)}."
            )
        return found

    def key(self, table: TableId, place: str) -> tuple[str, ...]:
        """The key columns of a table. Raises ConfigError if the whole row is its key."""
        schema = self.schema(table, place)
        if schema.keyed_by_row:
            raise ConfigError(
                f"{place}: {table} has no primary key, so its rows cannot be told apart.",
                f"Add one, or name a unique index: alter table {table} replica identity using index …",
            )
        return tuple(column.name for column in schema.key)


def _near(word: str, known: object) -> str:
    close = difflib.get_close_matches(word, [str(item) for item in known], n=1, cutoff=0.5)  # type: ignore[attr-defined]
    return f"; did you mean {close[0]}?" if close else "."

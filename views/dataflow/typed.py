"""Steps on rows of typed columns: cells become values, expressions are evaluated, values become JSON. No state."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.errors import ViewError
from cdc.expressions.program import Program
from cdc.expressions.values import json_cells, typed_cells
from views.dataflow.cells import Member, joined, rendered
from views.dataflow.delta import ID, SIGN
from views.dataflow.output import ROW

KEY = "_key"
_WHOLE = ("SMALLINT", "INTEGER", "BIGINT")


@dataclass(frozen=True, slots=True)
class ReadValues:
    """Cells become values: triples of the cell's column, the value's name, and its type."""

    columns: tuple[tuple[str, str, str], ...]
    view: str
    keep: tuple[str, ...] = ()
    """Columns that stay as they are."""

    def step(self, delta: pa.Table) -> pa.Table:
        """The same rows. Raises ViewError if a value does not fit its type."""
        found: dict[str, AnyArray] = {name: delta.column(name) for name in (ID, SIGN, *self.keep)}
        for cell, name, type_ in self.columns:
            try:
                found[name] = typed_cells(delta.column(cell), type_)
            except ValueError:
                raise ViewError(
                    f"View {self.view}: a value of {name} does not fit {type_.lower()}.",
                    "Cast the column to text in the statement, or leave it out.",
                ) from None
        return pa.table(found)


@dataclass(frozen=True, slots=True)
class Computed:
    """Evaluates expressions; rows that do not meet the program's condition are left out, old ones like new ones."""

    program: Program

    def step(self, delta: pa.Table) -> pa.Table:
        """The values of the program, and the columns that it does not read."""
        return self.program.run(delta)


@dataclass(frozen=True, slots=True)
class Keyed:
    """Adds the text of some values as a column, to join or group by; null if any is null, unless `nulls` are equal."""

    name: str
    parts: tuple[tuple[str, str], ...]
    """Pairs of column and type."""
    nulls: bool = False

    def step(self, delta: pa.Table) -> pa.Table:
        """The same rows with one column more."""
        return delta.append_column(self.name, texts(delta, self.parts, nulls=self.nulls))


def texts(rows: pa.Table, parts: Sequence[tuple[str, str]], *, nulls: bool) -> AnyArray:
    """Values as one text for each row: their JSON, which differs where the values do."""
    if not parts:
        return pa.repeat("", rows.num_rows)
    cells = [cells_of(rows.column(name), type_) for name, type_ in parts]
    return joined([pc.fill_null(each, "null") for each in cells] if nulls else cells)


def cells_of(column: AnyArray, type_: str) -> AnyArray:
    """`json_cells`, faster for whole numbers."""
    return pc.cast(column, pa.string()) if type_ in _WHOLE else json_cells(column, type_)


@dataclass(frozen=True, slots=True)
class Shown:
    """Rows as JSON objects: ROW, and KEY with the key's members."""

    columns: tuple[tuple[str, str], ...]
    """Pairs of name and type."""
    key: tuple[str, ...]
    constant: tuple[tuple[str, str], ...] = ()
    """Further members that every row has: pairs of name and JSON text. They come first, and are part of the key."""

    def step(self, delta: pa.Table) -> pa.Table:
        """The rows with ROW and KEY only."""
        cells = {name: cells_of(delta.column(name), type_) for name, type_ in self.columns}
        for name, text in self.constant:
            cells[name] = pa.repeat(text, delta.num_rows)
        rows = pa.table(cells)
        always = [name for name, _ in self.constant]
        key = rendered(rows, [Member(name, name) for name in (*always, *self.key)])
        row = rendered(rows, [Member(name, name) for name in (*always, *(name for name, _ in self.columns))])
        own: dict[str, AnyArray] = {name: delta.column(name) for name in (ID, SIGN)}
        return pa.table({**own, KEY: key, ROW: row})

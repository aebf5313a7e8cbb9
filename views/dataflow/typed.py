"""Steps on rows of typed columns: cells become values, expressions are evaluated, values become JSON. No state."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.errors import ViewError
from cdc.expressions import engine
from cdc.expressions.engine import quoted
from cdc.expressions.program import Program
from cdc.expressions.values import cell_sql, text_cells, typed_cells
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
class Cells:
    """The JSON texts of the values of some columns: pairs of name and type."""

    columns: tuple[tuple[str, str], ...]
    _statements: engine.Statements = field(default_factory=engine.statements, repr=False, compare=False)

    def of(self, rows: pa.Table) -> dict[str, AnyArray]:
        """By name, in order. One query for all of them: a query of a few rows costs a millisecond."""
        found: dict[str, AnyArray] = {}
        others: list[tuple[str, str]] = []
        for name, type_ in self.columns:
            values: AnyArray = rows.column(name).combine_chunks()
            if type_ in _WHOLE:
                found[name] = pc.cast(values, pa.string())
            elif pa.types.is_string(values.type):
                found[name] = text_cells(values, type_)
            else:
                others.append((name, type_))
        if others:
            select = ", ".join(f"{cell_sql(quoted(name), type_)} as {quoted(name)}" for name, type_ in others)
            cells = self._statements.run(select, rows.select([name for name, _ in others]))
            found |= {name: cells.column(name).combine_chunks().cast(pa.string()) for name, _ in others}
        return {name: found[name] for name, _ in self.columns}


class Keyed:
    """Adds the text of some values as a column, to join or group by; null if any is null, unless `nulls` are equal."""

    def __init__(self, name: str, parts: Sequence[tuple[str, str]], *, nulls: bool = False) -> None:
        """`parts` are pairs of column and type."""
        self._name, self._cells, self._nulls = name, Cells(tuple(parts)), nulls

    def step(self, delta: pa.Table) -> pa.Table:
        """The same rows with one column more: their JSON, which differs where the values do."""
        cells = list(self._cells.of(delta).values())
        if not cells:
            return delta.append_column(self._name, pa.repeat("", delta.num_rows))
        text = joined([pc.fill_null(each, "null") for each in cells] if self._nulls else cells)
        return delta.append_column(self._name, text)


class Shown:
    """Rows as JSON objects: ROW, and KEY with the key's members."""

    def __init__(
        self, columns: Sequence[tuple[str, str]], key: Sequence[str], constant: Sequence[tuple[str, str]] = ()
    ) -> None:
        """`columns` are pairs of name and type. `constant` are further members that every row has, pairs of name and
        JSON text: they come first, and are part of the key."""
        self._cells, self._key, self._constant = Cells(tuple(columns)), tuple(key), tuple(constant)

    def step(self, delta: pa.Table) -> pa.Table:
        """The rows with ROW and KEY only."""
        cells = self._cells.of(delta)
        names = list(cells)
        for name, text in self._constant:
            cells[name] = pa.repeat(text, delta.num_rows)
        rows = pa.table(cells)
        always = [name for name, _ in self._constant]
        key = rendered(rows, [Member(name, name) for name in (*always, *self._key)])
        row = rendered(rows, [Member(name, name) for name in (*always, *names)])
        own: dict[str, AnyArray] = {name: delta.column(name) for name in (ID, SIGN)}
        return pa.table({**own, KEY: key, ROW: row})

"""Named expressions and a condition, compiled for columns of known types and evaluated over Arrow tables by DuckDB."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.errors import MillraceError
from cdc.expressions import engine
from cdc.expressions.column_types import is_opaque
from cdc.expressions.expression import Expression
from cdc.expressions.translation import Inputs, Translated, translate
from cdc.expressions.values import cell_sql, json_value, text_cells

_NO_VALUE = "it has no value"
_REASONS = 100
"""Failures whose reason is found out, each by a query of its own, in one batch."""
_AS_TEXT = ("UUID", "JSON", "TIME", "VARCHAR", "BPCHAR", "NUMERIC")


class ExpressionFailed(MillraceError):
    """An expression has no value for some row. The message names the expression, never a value of the row."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The values of a program, row by row as given; `failed` has the number of each row without a value, and why.

    The trap: such a row has nulls instead of the values that failed.
    """

    rows: pa.Table
    failed: dict[int, str]


@dataclass(frozen=True, slots=True)
class Program:
    """Expressions over columns of known types. May be used by several threads."""

    types: Mapping[str, str]
    """The types of the values, by name (`cdc.expressions.column_types`)."""
    columns: tuple[str, ...]
    """The columns that the expressions read."""
    _inputs: Inputs = field(repr=False)
    _select: Mapping[str, tuple[Expression, Translated]] = field(repr=False)
    _where: tuple[Expression, Translated] | None = field(repr=False)
    _statements: engine.Statements = field(repr=False, compare=False)

    def run(self, rows: pa.Table) -> pa.Table:
        """The values of the rows that meet the condition, in their order, then the columns of `rows` that are none of
        the program's. Raises ExpressionFailed if an expression has no value for some row."""
        passed = [name for name in rows.column_names if name not in self.columns and name not in self.types]
        try:
            outputs = [output_sql(one) for _, one in self._select.values()]
            return self._run(rows, passed, outputs, self._condition()).rename_columns([*self._select, *passed])
        except duckdb.Error:
            failed = self.run_each(rows).failed
            reason = next(iter(failed.values()), "the condition has no value for a row")
            raise ExpressionFailed(reason, "Change the expression, or the row in the source.") from None

    def run_each(self, rows: pa.Table, only: Collection[str] | None = None, *, as_json: bool = False) -> Evaluated:
        """The values of every row, whether it meets the condition or not, and the rows for which there are none.

        `only` names the expressions to evaluate. `as_json`: their JSON texts, as `json_cells` makes them, at no further
        cost. A row with several failures has the reason of the first.
        """
        select = {name: one for name, one in self._select.items() if only is None or name in only}
        outputs = [_json(one) if as_json else output_sql(one) for _, one in select.values()]
        failed: dict[int, str] = {}
        try:
            found: dict[str, AnyArray] = dict(zip(select, self._run(rows, [], outputs, "").columns, strict=True))
        except duckdb.Error:
            found, failed = self._tried(rows, select, outputs)
        if as_json:
            found = {name: text_cells(cells.combine_chunks(), self.types[name]) for name, cells in found.items()}
        return Evaluated(pa.table(found), failed)

    def _tried(
        self, rows: pa.Table, select: Mapping[str, tuple[Expression, Translated]], outputs: Sequence[str]
    ) -> tuple[dict[str, AnyArray], dict[int, str]]:
        """The values where there are some. The struct tells a failure from NULL."""
        tried = self._run(rows, [], [f"TRY({{'value': {output}}})" for output in outputs], "")
        failed: dict[int, str] = {}
        values: dict[str, AnyArray] = {}
        for column, (name, (expression, one)) in zip(tried.columns, select.items(), strict=True):
            wrapped: AnyArray = column.combine_chunks()
            for number in np.flatnonzero(wrapped.is_null().to_numpy(zero_copy_only=False)).tolist():
                if number not in failed:
                    known = len(failed) < _REASONS
                    reason = self._failure(rows.slice(number, 1), one) if known else _NO_VALUE
                    failed[number] = f"{expression.place}: {reason}"
            values[name] = pa.chunked_array([pc.struct_field(wrapped, "value")])
        return values, failed

    def _condition(self) -> str:
        return f" WHERE {self._where[1].sql}" if self._where is not None else ""

    def _run(self, rows: pa.Table, passed: Sequence[str], outputs: Sequence[str], condition: str) -> pa.Table:
        given: dict[str, AnyArray] = {
            f"c{number}": rows[name] for number, name in enumerate(self._inputs.types) if name in self.columns
        }
        given |= {f"p{number}": rows[name] for number, name in enumerate(passed)}
        selected = [f"{output} AS o{number}" for number, output in enumerate(outputs)]
        selected += [f"p{number}" for number in range(len(passed))]
        given_rows = pa.table(given) if given else pa.table({"none": pa.nulls(rows.num_rows)})
        found = self._statements.run(", ".join(selected) or "1 AS none", given_rows, condition)
        return found if selected else found.select([])

    def _failure(self, row: pa.Table, one: Translated) -> str:
        try:
            self._run(row, [], [output_sql(one)], "")
        except duckdb.OutOfRangeException:
            return "a number is out of range"
        except duckdb.ConversionException:
            return "a value cannot be converted"
        except duckdb.Error as error:
            return "division by zero" if "ivision by zero" in str(error) else _NO_VALUE
        return _NO_VALUE


def compile_program(select: Mapping[str, Expression], where: Expression | None, columns: Mapping[str, str]) -> Program:
    """Check expressions against columns and their types. Raises ConfigError for the first that does not fit."""
    inputs = Inputs(columns)
    translated = {name: (expression, translate(expression, inputs)) for name, expression in select.items()}
    condition = (where, translate(where, inputs)) if where is not None else None
    if condition is not None and condition[1].type != "BOOLEAN":
        raise condition[0].error(
            f"the condition is {condition[1].type.lower()}, not boolean.",
            "Compare it, for instance: status = 'paid'",
            condition[0].tree,
        )
    used = set(_columns(select, where))
    types = {name: one.type for name, (_, one) in translated.items()}
    read = tuple(name for name in columns if name in used)
    return Program(types, read, inputs, translated, condition, engine.statements())


def _columns(select: Mapping[str, Expression], where: Expression | None) -> Iterator[str]:
    for expression in (*select.values(), *([where] if where is not None else [])):
        yield from expression.columns


def _json(one: Translated) -> str:
    return output_sql(one) if one.as_text else json_value(one.sql, one.type)


def output_sql(one: Translated) -> str:
    """SQL for a value as Arrow has it: some types as their text, arrays as JSON, a sum as a decimal."""
    if one.type.endswith("[]") and not one.as_text:
        return cell_sql(one.sql, one.type)
    if one.type in _AS_TEXT or is_opaque(one.type) or one.as_text:
        return f"CAST({one.sql} AS VARCHAR)"
    return f"CAST({one.sql} AS {one.type})"

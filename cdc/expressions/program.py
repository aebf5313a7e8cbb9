"""Named expressions and a condition, compiled for columns of known types and evaluated over Arrow tables by DuckDB."""

import threading
from collections.abc import Iterator, Mapping, Sequence
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
from cdc.expressions.values import cell_sql

_ROWS = "given"
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
    _connection: duckdb.DuckDBPyConnection = field(repr=False, compare=False)
    _lock: threading.Lock = field(repr=False, compare=False, default_factory=threading.Lock)

    def run(self, rows: pa.Table) -> pa.Table:
        """The values of the rows that meet the condition, in their order, then the columns of `rows` that are none of
        the program's. Raises ExpressionFailed if an expression has no value for some row."""
        passed = [name for name in rows.column_names if name not in self.columns and name not in self.types]
        try:
            return self._run(rows, passed, [output_sql(*each) for each in self._select.values()], self._condition())
        except duckdb.Error:
            failed = self.run_each(rows).failed
            reason = next(iter(failed.values()), "the condition has no value for a row")
            raise ExpressionFailed(reason, "Change the expression, or the row in the source.") from None

    def run_each(self, rows: pa.Table) -> Evaluated:
        """The values of every row, whether it meets the condition or not, and the rows for which there are none."""
        outputs = [output_sql(*each) for each in self._select.values()]
        try:
            return Evaluated(self._run(rows, [], outputs, ""), {})
        except duckdb.Error:
            tried = self._run(rows, [], [f"TRY({{'value': {output}}})" for output in outputs], "")
        failed: dict[int, str] = {}
        values: dict[str, AnyArray] = {}
        for name, (expression, one) in self._select.items():
            wrapped: AnyArray = tried[name].combine_chunks()
            for number in np.flatnonzero(wrapped.is_null().to_numpy(zero_copy_only=False)).tolist():
                if number not in failed:
                    failed[number] = f"{expression.place}: {self._failure(rows.slice(number, 1), expression, one)}"
            values[name] = pc.struct_field(wrapped, "value")
        return Evaluated(pa.table(values), failed)

    def _condition(self) -> str:
        return f" WHERE {self._where[1].sql}" if self._where is not None else ""

    def _run(self, rows: pa.Table, passed: Sequence[str], outputs: Sequence[str], condition: str) -> pa.Table:
        given: dict[str, AnyArray] = {
            f"c{number}": rows[name] for number, name in enumerate(self._inputs.types) if name in self.columns
        }
        given |= {f"p{number}": rows[name] for number, name in enumerate(passed)}
        selected = [f"{output} AS o{number}" for number, output in enumerate(outputs)]
        selected += [f"p{number}" for number in range(len(passed))]
        query = f"SELECT {', '.join(selected) or '1 AS none'} FROM {_ROWS}{condition}"  # noqa: S608  SQL of `translate`
        with self._lock:
            self._connection.register(_ROWS, pa.table(given) if given else pa.table({"none": pa.nulls(rows.num_rows)}))
            found: pa.Table = self._connection.sql(query).to_arrow_table()
            self._connection.unregister(_ROWS)
        return found.rename_columns([*self._select, *passed]) if selected else found.select([])

    def _failure(self, row: pa.Table, expression: Expression, one: Translated) -> str:
        try:
            self._run(row, [], [output_sql(expression, one)] * len(self._select), "")
        except duckdb.OutOfRangeException:
            return "a number is out of range"
        except duckdb.ConversionException:
            return "a value cannot be converted"
        except duckdb.Error as error:
            return "division by zero" if "ivision by zero" in str(error) else "it cannot be computed"
        return "it cannot be computed"


def compile_program(select: Mapping[str, Expression], where: Expression | None, columns: Mapping[str, str]) -> Program:
    """Check expressions against columns and their types. Raises ConfigError for the first that does not fit."""
    inputs = Inputs(columns)
    translated = {name: (expression, translate(expression, inputs)) for name, expression in select.items()}
    condition = (where, translate(where, inputs)) if where is not None else None
    if condition is not None and condition[1].type != "BOOLEAN":
        raise condition[0].error(
            f"the condition is {condition[1].type.lower()}, not boolean.", "Compare it, for instance: status = 'paid'"
        )
    used = set(_columns(select, where))
    types = {name: one.type for name, (_, one) in translated.items()}
    read = tuple(name for name in columns if name in used)
    return Program(types, read, inputs, translated, condition, engine.cursor())


def _columns(select: Mapping[str, Expression], where: Expression | None) -> Iterator[str]:
    for expression in (*select.values(), *([where] if where is not None else [])):
        yield from expression.columns


def output_sql(expression: Expression, one: Translated) -> str:
    """SQL for a value as Arrow has it: some types as their text, arrays as JSON, a sum as a decimal."""
    if one.type.endswith("[]") and expression.column is None:
        return cell_sql(one.sql, one.type)
    if one.type in _AS_TEXT or one.type.endswith("[]") or is_opaque(one.type):
        return f"CAST({one.sql} AS VARCHAR)"
    return f"CAST({one.sql} AS {one.type})"

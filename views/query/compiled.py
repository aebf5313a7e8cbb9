"""A statement as steps of a graph.

The order: the values of each input, with the conditions that concern it alone; the joins from left to right; the other
conditions; the groups; the columns of the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import pyarrow as pa
from sqlglot import exp

from cdc.expressions.column_types import postgres_name
from cdc.expressions.expression import Expression, column_name
from cdc.expressions.program import Program, compile_program
from cdc.expressions.values import arrow_type
from cdc.model import TableId
from views.comparable import have_equal_texts, is_exact
from views.dataflow.aggregate import GROUP, Call, GroupedRows, RunningTotals, Total
from views.dataflow.graph import GraphBuilder
from views.dataflow.join import Join, Side
from views.dataflow.typed import Computed, Keyed, ReadValues
from views.query.aggregates import reduced, sum_digits
from views.query.grouping import Grouping, grouping_of, part_of
from views.query.statement import Input, JoinClause, Statement, aliases_of

_JOINED = "_join"


@dataclass(frozen=True, slots=True)
class Relation:
    """The rows after some step: its number, and the types of their columns."""

    at: int
    types: Mapping[str, str]

    @property
    def schema(self) -> pa.Schema:
        """Their Arrow types."""
        return arrow_schema(self.types, self.types)


def arrow_schema(names: Sequence[str] | Mapping[str, str], types: Mapping[str, str]) -> pa.Schema:
    """Columns with the Arrow types of their types in expressions."""
    return pa.schema([(name, arrow_type(types[name])) for name in names])


def add_statement(steps: GraphBuilder, statement: Statement, view: str) -> Relation:
    """Add the steps of a statement; returns the columns of its result. Raises ConfigError with the place of an
    expression that does not fit."""
    work = _Compiler(steps, statement, view)
    rows, rest = work.joined()
    return work.grouped(rows, rest) if statement.grouped else work.selected(rows, rest)


class _Compiler:
    def __init__(self, steps: GraphBuilder, statement: Statement, view: str) -> None:
        self._steps, self._statement, self._view = steps, statement, view
        self._needed = needed_columns(statement)

    def joined(self) -> tuple[Relation, tuple[Expression, ...]]:
        """The rows of FROM, and the conditions of WHERE that are still to be met."""
        statement = self._statement
        pushed, rest = pushed_down(statement)
        first = statement.inputs[0]
        rows = self._input(first, pushed[first.alias])
        for clause, each in zip(statement.joins, statement.inputs[1:], strict=True):
            own = self._input(each, (*pushed[each.alias], *clause.own))
            rows = self._join(rows, own, clause, each.alias)
        return rows, rest

    def _input(self, each: Input, conditions: Sequence[Expression]) -> Relation:
        types = {name: type_ for name, type_ in each.types.items() if name in self._needed}
        cells = tuple((name.partition(".")[2], name, type_) for name, type_ in types.items())
        read = ReadValues(cells, self._view)
        at = self._steps.add(f"{each.alias} values", read.step, [self._steps.input(each.table)], f"reads {each.table}")
        return self._filtered(Relation(at, types), conditions, f"{each.alias} where")

    def _filtered(self, rows: Relation, conditions: Sequence[Expression], name: str) -> Relation:
        """The rows that meet the conditions."""
        if not conditions:
            return rows
        program = self._program({column: identity(column) for column in rows.types}, conditions, rows.types)
        text = " and ".join(condition.tree.sql("postgres") for condition in conditions)
        return Relation(
            self._steps.add(name, Computed(program).step, [rows.at], f"keeps rows where {text}"), rows.types
        )

    def _program(
        self, select: Mapping[str, Expression], conditions: Sequence[Expression], types: Mapping[str, str]
    ) -> Program:
        return compile_program(select, conjunction(conditions, self._statement), types)

    def _join(self, left: Relation, right: Relation, clause: JoinClause, alias: str) -> Relation:
        left_at, left_types = self._keyed(left, [one for one, _ in clause.equal], f"{alias} left")
        right_at, right_types = self._keyed(right, [two for _, two in clause.equal], f"{alias} right")
        for (one, two), *types in zip(clause.equal, left_types, right_types, strict=True):
            _require_same_type(one, two, *types)
        join = Join(_side(left), _side(right), clause.kind)
        keys = ", ".join(f"{one.tree.sql('postgres')} = {two.tree.sql('postgres')}" for one, two in clause.equal)
        text = f"{clause.kind} join by index: {keys}"
        at = self._steps.add(f"{alias} join", join.step, [left_at, right_at], text, join.tables)
        return self._filtered(Relation(at, {**left.types, **right.types}), clause.rest, f"{alias} on")

    def _keyed(self, rows: Relation, keys: Sequence[Expression], name: str) -> tuple[int, list[str]]:
        """The rows with the text of their key, and the types of its parts."""
        at, parts = rows.at, [(str(key.column), rows.types.get(str(key.column), "")) for key in keys]
        if any(key.column is None for key in keys):
            computed = {f"_k{number}": key for number, key in enumerate(keys)}
            select = {column: identity(column) for column in rows.types}
            program = self._program({**select, **computed}, (), rows.types)
            at = self._steps.add(f"{name} key", Computed(program).step, [at])
            parts = [(column, program.types[column]) for column in computed]
        return self._steps.add(f"{name} by key", Keyed(_JOINED, tuple(parts)).step, [at]), [type_ for _, type_ in parts]

    def grouped(self, rows: Relation, conditions: Sequence[Expression]) -> Relation:
        """The rows of the groups, with the columns of the result."""
        found = grouping_of(self._statement)
        before = self._program(found.arguments or {"_one": _one()}, conditions, rows.types)
        at = self._steps.add("arguments", Computed(before).step, [rows.at])
        _require_exact(found, before.types)
        parts = tuple((name, before.types[name]) for name in found.key)
        at = self._steps.add("keys", Keyed(GROUP, parts, nulls=True).step, [at])
        groups = self._groups(found, before.types, at)
        return self._result(groups, found.items, [found.having] if found.having is not None else [])

    def _groups(self, found: Grouping, types: Mapping[str, str], at: int) -> Relation:
        calls, computed = calls_of(found, types, self._statement)
        result = {**{name: types[name] for name in found.key}, **computed}
        keys = arrow_schema(found.key, types)
        arguments = [name for name in found.arguments if name not in found.key]
        by = ", ".join(each.tree.sql("postgres") for each in self._statement.group) or "one group"
        if all(call.totals_sql for call in calls):
            totals = RunningTotals(
                keys, calls, [Total(name, sum_digits(types[name])) for name in arguments], self._view
            )
            text = f"counts and sums by {by}, changed in place"
            return Relation(self._steps.add("groups", totals.step, [at], text, totals.tables), result)
        kept = GroupedRows(keys, calls, arrow_schema(arguments, types), self._view)
        text = f"rows by {by}, a changed group is computed anew"
        return Relation(self._steps.add("groups", kept.step, [at], text, kept.tables), result)

    def selected(self, rows: Relation, conditions: Sequence[Expression]) -> Relation:
        """The columns of the result, of a statement without groups."""
        return self._result(rows, {item.name: item.expression for item in self._statement.items}, conditions)

    def _result(self, rows: Relation, items: Mapping[str, Expression], conditions: Sequence[Expression]) -> Relation:
        program = self._program(items, conditions, rows.types)
        at = self._steps.add("result", Computed(program).step, [rows.at], "the columns of the result")
        return Relation(at, program.types)


def calls_of(found: Grouping, types: Mapping[str, str], statement: Statement) -> tuple[list[Call], dict[str, str]]:
    """The aggregates of a statement, and the types of their columns. `types` are those of their arguments."""
    calls, computed = [], {}
    for name, call, columns in found.calls:
        how = reduced(call, columns, [types[each] for each in columns], part_of(statement, call.node))
        calls.append(Call(name, arrow_type(how.type), how.rows_sql, how.totals_sql))
        computed[name] = how.type
    return calls, computed


def identity(name: str) -> Expression:
    """A column as an expression."""
    table, dot, column = name.partition(".")
    parts = [exp.to_identifier(column if dot else table, quoted=True)]
    tree = exp.column(parts[0], exp.to_identifier(table, quoted=True) if dot else None)
    return Expression(name, "", (name,), tree)


def conjunction(conditions: Sequence[Expression], statement: Statement) -> Expression | None:
    """Conditions joined by AND; None if there is none."""
    if not conditions:
        return None
    tree = conditions[0].tree.copy()
    for other in conditions[1:]:
        tree = exp.And(this=exp.Paren(this=tree), expression=exp.Paren(this=other.tree.copy()))
    return part_of(statement, tree)


def needed_columns(statement: Statement) -> set[str]:
    """The qualified names of all columns that a statement uses. Raises ConfigError for an unknown one."""
    parts = _parts(statement)
    used = {name for part in parts for name in part.columns}
    for each in statement.inputs:  # a table of which nothing is used still counts its rows
        if not used & set(each.types):
            used.add(each.key[0])
    for part in parts:
        for name in part.columns:
            if name not in statement.types and name != "*":
                _unknown_column(part, name, statement.types)
    return used


def _parts(statement: Statement) -> list[Expression]:
    parts = [item.expression for item in statement.items]
    parts += [*statement.where, *statement.group, *([statement.having] if statement.having is not None else [])]
    for clause in statement.joins:
        parts += [each for pair in clause.equal for each in pair]
        parts += [*clause.own, *clause.rest]
    return parts


def _unknown_column(whole: Expression, name: str, types: Mapping[str, str]) -> None:
    near = get_close_matches(name, types, 3) or get_close_matches(name.rpartition(".")[2], types, 3)
    node = next(column for column in whole.tree.find_all(exp.Column) if column_name(column) == name)
    remedy = f"Did you mean {' or '.join(near)}? " if near else ""
    raise whole.error(f"unknown column {name!r}.", f"{remedy}Columns: {', '.join(types)}.", node)


def pushed_down(statement: Statement) -> tuple[dict[str, tuple[Expression, ...]], tuple[Expression, ...]]:
    """The conditions of WHERE that can be met before the joins, by alias, and the others.

    Not those on a table whose columns an outer join fills with nulls.
    """
    filled = _filled_with_nulls(statement)
    pushed: dict[str, tuple[Expression, ...]] = {each.alias: () for each in statement.inputs}
    rest: list[Expression] = []
    for condition in statement.where:
        aliases = aliases_of(condition)
        if len(aliases) == 1 and not aliases & filled and aliases <= set(pushed):
            (alias,) = aliases
            pushed[alias] = (*pushed[alias], condition)
        else:
            rest.append(condition)
    return pushed, tuple(rest)


def _filled_with_nulls(statement: Statement) -> set[str]:
    filled: set[str] = set()
    for number, clause in enumerate(statement.joins):
        before = {each.alias for each in statement.inputs[: number + 1]}
        own = {statement.inputs[number + 1].alias}
        filled |= {"left": own, "right": before, "full": own | before}.get(clause.kind, set())
    return filled


def table_columns(statement: Statement) -> dict[TableId, tuple[str, ...]]:
    """The columns that are needed of each captured table."""
    needed = needed_columns(statement)
    found: dict[TableId, set[str]] = {}
    for each in statement.inputs:
        names = {name.partition(".")[2] for name in each.types if name in needed}
        found[each.table] = found.get(each.table, set()) | names
    return {table: tuple(sorted(names)) for table, names in found.items()}


def _side(rows: Relation) -> Side:
    return Side(_JOINED, pa.schema([*rows.schema, (_JOINED, pa.string())]), (*rows.types, ""))


def _one() -> Expression:
    return Expression("1", "", (), exp.Literal.number(1))


def _require_same_type(one: Expression, two: Expression, one_type: str, two_type: str) -> None:
    """Rows are found by the texts of their keys, which must be the same for equal values."""
    if have_equal_texts(one_type, two_type):
        return
    types = [
        f"{each.tree.sql('postgres')} is {postgres_name(type_)}" for each, type_ in ((one, one_type), (two, two_type))
    ]
    remedy = "Cast both to one type: a whole number, numeric(p,s), text, uuid, a date or a time."
    raise one.error(f"{', '.join(types)}: equal values may have different texts.", remedy, one.tree)


def _require_exact(found: Grouping, types: Mapping[str, str]) -> None:
    for name in found.key:
        if not is_exact(types[name]):
            whole = found.arguments[name]
            message = f"a group by {postgres_name(types[name])}: equal values may have different texts."
            raise whole.error(message, "Cast it, for instance to numeric(p,s) or text.", whole.tree)

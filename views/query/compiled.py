"""A statement as steps of a graph.

The order: the values of each input, with the conditions that concern it alone; the joins from left to right; the other
conditions; the groups; the columns of the result.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from sqlglot import exp

from cdc.errors import ConfigError
from cdc.expressions.expression import Expression
from cdc.expressions.program import Program, compile_program
from cdc.expressions.values import arrow_type
from cdc.model import TableId
from views.dataflow.aggregate import GROUP, Call, GroupedRows, RunningTotals, Total
from views.dataflow.graph import Step
from views.dataflow.join import Join, Side
from views.dataflow.typed import Computed, Keyed, Typed
from views.query.aggregates import Aggregate, aggregate_of, reduced, sum_digits
from views.query.statement import Input, JoinClause, Statement, aliases_of

Add = Callable[[str, Step, Sequence[int], str], int]


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
    columns = dict.fromkeys(name for condition in conditions for name in condition.columns)
    return Expression(statement.text, statement.place, tuple(columns), tree)


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups of a statement: what is computed before them, and how the columns of the result follow."""

    arguments: Mapping[str, Expression]
    """Columns before: `g0`… the key, `x0`… the arguments of the aggregates."""
    key: tuple[str, ...]
    calls: tuple[tuple[str, Aggregate, tuple[str, ...]], ...]
    """The name of the result's column, the aggregate, and the columns of its arguments."""
    items: Mapping[str, Expression]
    """The columns of the result over `g0`…, `a0`…"""
    having: Expression | None


def grouping_of(statement: Statement) -> Grouping:
    """Take the aggregates out of a statement. Raises ConfigError for a column that is in no group."""
    arguments: dict[str, Expression] = {f"g{number}": each for number, each in enumerate(statement.group)}
    key = tuple(arguments)
    calls: list[tuple[str, Aggregate, tuple[str, ...]]] = []
    known = {each.tree.sql(): name for name, each in arguments.items()}

    def argument(tree: exp.Expr, condition: exp.Expr | None) -> str:
        if condition is not None:
            tree = exp.Case(ifs=[exp.If(this=condition.copy(), true=tree.copy())])
        name = next((name for name, each in arguments.items() if name[0] == "x" and each.tree == tree), "")
        if not name:
            name = f"x{len(arguments) - len(key)}"
            arguments[name] = _part(tree, statement)
        return name

    def replaced(node: exp.Expr, whole: Expression) -> exp.Expr:
        if (name := known.get(node.sql())) is not None:
            return exp.column(exp.to_identifier(name, quoted=True))
        call = aggregate_of(node, whole)
        if call is None:
            return node
        values = call.arguments or ((exp.Literal.number(1),) if call.condition is not None else ())
        columns = tuple(argument(each, call.condition) for each in values)
        found = next((name for name, other, used in calls if (other.node, used) == (node, columns)), "")
        if not found:
            found = f"a{len(calls)}"
            calls.append((found, call, columns))
        return exp.column(exp.to_identifier(found, quoted=True))

    def rewritten(whole: Expression) -> Expression:
        tree = whole.tree.copy().transform(lambda node: replaced(node, whole))
        for column in tree.find_all(exp.Column):
            if column.table or column.name not in {*key, *(name for name, _, _ in calls)}:
                raise whole.error(
                    f"{column.sql('postgres')} is neither in GROUP BY nor in an aggregate.",
                    "Add it to GROUP BY, or aggregate it: max(…)",
                    column,
                )
        return _part(tree, statement)

    items = {item.name: rewritten(item.expression) for item in statement.items}
    having = rewritten(statement.having) if statement.having is not None else None
    return Grouping(arguments, key, tuple(calls), items, having)


def _part(tree: exp.Expr, statement: Statement) -> Expression:
    columns = dict.fromkeys(".".join(part.name for part in column.parts) for column in tree.find_all(exp.Column))
    return Expression(statement.text, statement.place, tuple(columns), tree)


@dataclass(frozen=True, slots=True)
class Relation:
    """The rows after some step: its number, and the types of their columns."""

    at: int
    types: Mapping[str, str]

    @property
    def schema(self) -> pa.Schema:
        """Their Arrow types."""
        return pa.schema([(name, arrow_type(type_)) for name, type_ in self.types.items()])


class Compiler:
    """Adds the steps of one statement."""

    def __init__(self, statement: Statement, view: str, add: Add, input_of: Callable[[TableId], int]) -> None:
        self._statement, self._view, self._add, self._input_of = statement, view, add, input_of
        self._needed = needed_columns(statement)

    def joined(self) -> tuple[Relation, tuple[Expression, ...]]:
        """The rows of FROM, and the conditions of WHERE that are still to be met."""
        statement = self._statement
        pushed, rest = pushed_down(statement)
        first = statement.inputs[0]
        rows = self._input(first, pushed[first.alias])
        for clause, each in zip(statement.joins, statement.inputs[1:], strict=True):
            own = self._input(each, (*pushed[each.alias], *clause.own))
            rows = self._join(rows, own, clause, each)
        return rows, rest

    def _input(self, each: Input, conditions: Sequence[Expression]) -> Relation:
        types = {name: type_ for name, type_ in each.types.items() if name in self._needed}
        cells = tuple((name.partition(".")[2], name, type_) for name, type_ in types.items())
        at = self._add(
            f"{each.alias} values", Typed(cells, self._view), [self._input_of(each.table)], f"reads {each.table}"
        )
        if not conditions:
            return Relation(at, types)
        program = self._program({name: identity(name) for name in types}, conditions, types)
        text = " and ".join(condition.tree.sql("postgres") for condition in conditions)
        return Relation(self._add(f"{each.alias} where", Computed(program), [at], f"keeps rows where {text}"), types)

    def _program(
        self, select: Mapping[str, Expression], conditions: Sequence[Expression], types: Mapping[str, str]
    ) -> Program:
        return compile_program(select, conjunction(conditions, self._statement), types)

    def _join(self, left: Relation, right: Relation, clause: JoinClause, each: Input) -> Relation:
        own = self._side(left, [pair[0] for pair in clause.equal], f"{each.alias} left")
        other = self._side(right, [pair[1] for pair in clause.equal], f"{each.alias} right")
        for (one, two), one_type, two_type in zip(clause.equal, own[2], other[2], strict=True):
            if not _same_key_type(one_type, two_type):
                raise one.error(
                    f"{one.tree.sql('postgres')} is {one_type.lower()}, {two.tree.sql('postgres')} is {two_type.lower()}.",
                    "Cast one side, so that both have one type.",
                    one.tree,
                )
        step = Join(own[1], other[1], clause.kind)
        keys = ", ".join(f"{a.tree.sql('postgres')} = {b.tree.sql('postgres')}" for a, b in clause.equal)
        text = f"{clause.kind} join by index: {keys}"
        joined = Relation(
            self._add(f"{each.alias} join", step, [own[0], other[0]], text), {**left.types, **right.types}
        )
        if not clause.rest:
            return joined
        program = self._program({name: identity(name) for name in joined.types}, clause.rest, joined.types)
        return Relation(
            self._add(f"{each.alias} on", Computed(program), [joined.at], "further conditions"), joined.types
        )

    def _side(self, rows: Relation, keys: Sequence[Expression], name: str) -> tuple[int, Side, list[str]]:
        """The rows with the text of their key."""
        plain = all(key.column is not None for key in keys)
        if plain:
            at, parts = rows.at, [(str(key.column), rows.types[str(key.column)]) for key in keys]
        else:
            select = {column: identity(column) for column in rows.types}
            computed = {f"_k{number}": key for number, key in enumerate(keys)}
            program = self._program({**select, **computed}, (), rows.types)
            at = self._add(f"{name} key", Computed(program), [rows.at], "")
            parts = [(column, program.types[column]) for column in computed]
        at = self._add(f"{name} by key", Keyed("_join", tuple(parts)), [at], "")
        side = Side("_join", pa.schema([*rows.schema, ("_join", pa.string())]), (*rows.types, ""))
        return at, side, [type_ for _, type_ in parts]

    def grouped(self, rows: Relation, conditions: Sequence[Expression]) -> Relation:
        """The rows of the groups, with the columns of the result."""
        found = grouping_of(self._statement)
        before = self._program(found.arguments or {"_one": _one()}, conditions, rows.types)
        at = self._add("arguments", Computed(before), [rows.at], "")
        parts = tuple((name, before.types[name]) for name in found.key)
        _require_exact(parts, found, self._statement)
        at = self._add("keys", Keyed(GROUP, parts, nulls=True), [at], "")
        step, types, text = self._aggregate(found, before.types)
        at = self._add("groups", step, [at], text)
        program = self._program(found.items, [found.having] if found.having else [], types)
        return Relation(self._add("result", Computed(program), [at], "the columns of the result"), program.types)

    def _aggregate(self, found: Grouping, types: Mapping[str, str]) -> tuple[Step, dict[str, str], str]:
        calls, result, totals = [], {name: types[name] for name in found.key}, True
        for name, call, columns in found.calls:
            error = _error_at(self._statement, call.node)
            how = reduced(call, columns, [types[column] for column in columns], error)
            calls.append(Call(name, arrow_type(how.type), how.rows_sql, how.totals_sql))
            result[name] = how.type
            totals = totals and bool(how.totals_sql)
        keys = pa.schema([(name, arrow_type(types[name])) for name in found.key])
        columns = [name for name in types if name.startswith("x")]
        by = ", ".join(each.tree.sql("postgres") for each in self._statement.group) or "one group"
        if totals:
            summed = [Total(name, sum_digits(types[name])) for name in columns]
            return RunningTotals(keys, calls, summed, self._view), result, f"counts and sums by {by}, changed in place"
        arguments = pa.schema([(name, arrow_type(types[name])) for name in columns])
        return (
            GroupedRows(keys, calls, arguments, self._view),
            result,
            f"rows by {by}, a changed group is computed anew",
        )

    def selected(self, rows: Relation, conditions: Sequence[Expression]) -> Relation:
        """The columns of the result, of a statement without groups."""
        program = self._program({each.name: each.expression for each in self._statement.items}, conditions, rows.types)
        return Relation(self._add("result", Computed(program), [rows.at], "the columns of the result"), program.types)


def needed_columns(statement: Statement) -> set[str]:
    """The qualified names of all columns that a statement uses."""
    parts: list[Expression] = [item.expression for item in statement.items]
    parts += [*statement.where, *statement.group, *([statement.having] if statement.having else [])]
    for clause in statement.joins:
        parts += [each for pair in clause.equal for each in pair]
        parts += [*clause.own, *clause.rest]
    used = {name for part in parts for name in part.columns}
    for each in statement.inputs:  # a table of which nothing is used still counts its rows
        if not used & set(each.types):
            used.add(each.key[0])
    unknown = sorted(used - set(statement.types) - {"*"})
    if unknown:
        whole = next(part for part in parts if unknown[0] in part.columns)
        _unknown_column(whole, unknown[0], statement.types)
    return used


def _unknown_column(whole: Expression, name: str, types: Mapping[str, str]) -> None:
    compile_program({name: whole} if not whole.tree.find(exp.AggFunc) else {name: identity(name)}, None, types)
    raise ConfigError(f"{whole.place}: unknown column {name}.", f"Columns: {', '.join(types)}.")


def pushed_down(statement: Statement) -> tuple[dict[str, tuple[Expression, ...]], tuple[Expression, ...]]:
    """The conditions of WHERE that can be met before the joins, by alias, and the others.

    Not those on a table whose columns an outer join fills with nulls.
    """
    filled: set[str] = set()
    for number, clause in enumerate(statement.joins):
        before = {each.alias for each in statement.inputs[: number + 1]}
        own = {statement.inputs[number + 1].alias}
        filled |= {"left": own, "right": before, "full": own | before}.get(clause.kind, set())
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


def table_columns(statement: Statement) -> dict[TableId, tuple[str, ...]]:
    """The columns that are needed of each captured table."""
    needed = needed_columns(statement)
    found: dict[TableId, set[str]] = {}
    for each in statement.inputs:
        names = {name.partition(".")[2] for name in each.types if name in needed}
        found[each.table] = found.get(each.table, set()) | names
    return {table: tuple(sorted(names)) for table, names in found.items()}


def _one() -> Expression:
    return Expression("1", "", (), exp.Literal.number(1))


def _same_key_type(one: str, other: str) -> bool:
    whole = {"SMALLINT", "INTEGER", "BIGINT"}
    return (one == other and one not in ("REAL", "DOUBLE")) or {one, other} <= whole


def _require_exact(parts: Iterable[tuple[str, str]], found: Grouping, statement: Statement) -> None:
    for name, type_ in parts:
        if type_ in ("REAL", "DOUBLE"):
            whole = found.arguments[name]
            raise whole.error("groups of floats are not exact.", "Cast it to numeric(p,s).", whole.tree)


def _error_at(statement: Statement, node: exp.Expr) -> Callable[[str, str], Exception]:
    whole = Expression(statement.text, statement.place, (), node)
    return lambda message, remedy: whole.error(message, remedy, node)

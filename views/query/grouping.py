"""The groups of a statement: its aggregates are taken out, and what is left is computed before and after them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlglot import exp

from cdc.expressions.expression import Expression, column_name
from views.query.aggregates import Aggregate, aggregate_of, is_aggregate
from views.query.statement import Statement


@dataclass(frozen=True, slots=True)
class Grouping:
    """What is computed before the groups, and how the columns of the result follow."""

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
    work = _Grouping(statement, {f"g{number}": each for number, each in enumerate(statement.group)})
    items = {item.name: work.rewritten(item.expression) for item in statement.items}
    having = work.rewritten(statement.having) if statement.having is not None else None
    return Grouping({**work.key, **work.arguments}, tuple(work.key), tuple(work.calls), items, having)


def part_of(statement: Statement, tree: exp.Expr) -> Expression:
    """A part of a statement that was made from its parts."""
    columns = dict.fromkeys(map(column_name, tree.find_all(exp.Column)))
    return Expression(statement.text, statement.place, tuple(columns), tree)


@dataclass(slots=True)
class _Grouping:
    statement: Statement
    key: dict[str, Expression]
    arguments: dict[str, Expression] = field(default_factory=dict)
    calls: list[tuple[str, Aggregate, tuple[str, ...]]] = field(default_factory=list)

    def rewritten(self, whole: Expression) -> Expression:
        """An expression over the columns of the groups."""
        tree = whole.tree.copy().transform(lambda node: self._replaced(node, whole))
        known = {*self.key, *(name for name, _, _ in self.calls)}
        for column in tree.find_all(exp.Column):
            if column.table or column.name not in known:
                raise whole.error(
                    f"{column.sql('postgres')} is neither in GROUP BY nor in an aggregate.",
                    "Add it to GROUP BY, or aggregate it: max(…)",
                    column,
                )
        return part_of(self.statement, tree)

    def _replaced(self, node: exp.Expr, whole: Expression) -> exp.Expr:
        for name, each in self.key.items():
            if each.tree == node:
                return _column(name)
        call = aggregate_of(node, whole)
        if call is None:
            return node
        if any(is_aggregate(inner) for each in call.arguments for inner in each.walk()):
            raise whole.error(
                "an aggregate of an aggregate.", "Aggregate a column, or compute of the aggregates.", node
            )
        return _column(self._call(call))

    def _call(self, call: Aggregate) -> str:
        """The column of an aggregate's value; equal calls have one."""
        values = call.arguments or ((exp.Literal.number(1),) if call.condition is not None else ())
        columns = tuple(self._argument(each, call.condition) for each in values)
        for name, other, used in self.calls:
            if (other.node, used) == (call.node, columns):
                return name
        name = f"a{len(self.calls)}"
        self.calls.append((name, call, columns))
        return name

    def _argument(self, tree: exp.Expr, condition: exp.Expr | None) -> str:
        """The column of an argument, which is null for rows that FILTER leaves out."""
        if condition is not None:
            tree = exp.Case(ifs=[exp.If(this=condition.copy(), true=tree.copy())])
        for name, each in self.arguments.items():
            if each.tree == tree:
                return name
        name = f"x{len(self.arguments)}"
        self.arguments[name] = part_of(self.statement, tree)
        return name


def _column(name: str) -> exp.Expr:
    return exp.column(exp.to_identifier(name, quoted=True))

"""A SELECT of the pipeline file, parsed and resolved against the captured tables. Pure.

Every column is qualified by its table's alias (`o.amount`). What cannot be kept up to date change by change is refused
here, with its place in the statement and what to write instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from cdc.errors import ConfigError
from cdc.expressions.column_types import columns_of
from cdc.expressions.expression import Expression, checked, column_name, fold_names
from cdc.model import TableId
from views.catalog import Catalog
from views.dataflow.join import Kind
from views.query.aggregates import is_aggregate

_REFUSED = {
    "with_": "a WITH clause",
    "distinct": "DISTINCT",
    "order": "ORDER BY",
    "limit": "LIMIT",
    "offset": "OFFSET",
    "windows": "a WINDOW clause",
    "qualify": "QUALIFY",
    "laterals": "LATERAL",
    "locks": "FOR UPDATE",
    "into": "INTO",
    "sample": "TABLESAMPLE",
    "only": "ONLY",
    "catalog": "the name of a database",
    "all": "GROUP BY ALL",
    "columns": "an alias with names of columns",
}
_KINDS: Mapping[str, Kind] = {"LEFT": "left", "RIGHT": "right", "FULL": "full"}


@dataclass(frozen=True, slots=True)
class Input:
    """A captured table under an alias, and the types of its columns in expressions by their qualified names."""

    alias: str
    table: TableId
    types: Mapping[str, str]
    key: tuple[str, ...]
    """The qualified names of its key columns."""


@dataclass(frozen=True, slots=True)
class JoinClause:
    """How an input is joined to those before it."""

    kind: Kind
    equal: tuple[tuple[Expression, Expression], ...]
    """Pairs that are equal: of the inputs before, and of this one."""
    own: tuple[Expression, ...]
    """Further conditions on this input alone."""
    rest: tuple[Expression, ...]
    """Further conditions on several inputs (inner joins only)."""


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """A column of the result."""

    name: str
    expression: Expression


@dataclass(frozen=True, slots=True)
class Statement:
    """A resolved SELECT."""

    text: str
    place: str
    inputs: tuple[Input, ...]
    joins: tuple[JoinClause, ...]
    """One for each input but the first."""
    where: tuple[Expression, ...]
    """Conditions that must all hold."""
    items: tuple[ResultColumn, ...]
    group: tuple[Expression, ...]
    having: Expression | None

    @property
    def grouped(self) -> bool:
        """Whether the result has a row per group instead of a row per row."""
        parts = [item.expression for item in self.items]
        return (
            bool(self.group)
            or self.having is not None
            or any(is_aggregate(node) for part in parts for node in part.tree.walk())
        )

    @property
    def types(self) -> dict[str, str]:
        """The types of all columns of all inputs."""
        return {name: type_ for each in self.inputs for name, type_ in each.types.items()}


def read_statement(text: str, catalog: Catalog, place: str) -> Statement:
    """Parse and resolve. Raises ConfigError with the place."""
    select = _parsed(text, place)
    fold_names(select)
    inputs = tuple(_inputs(select, catalog, place))
    reader = _Reader(text, place, inputs)
    items = tuple(reader.items(select))
    joins = tuple(
        reader.join(join, [each.alias for each in inputs[: number + 1]], inputs[number + 1].alias)
        for number, join in enumerate(select.args.get("joins") or ())
    )
    where = select.args.get("where")
    group, having = select.args.get("group"), select.args.get("having")
    return Statement(
        text,
        place,
        inputs,
        joins,
        tuple(reader.expression(part) for part in _conjuncts(where.this)) if where else (),
        items,
        tuple(reader.group(part, items) for part in group.expressions) if group else (),
        reader.expression(having.this, aggregates=True) if having else None,
    )


def _parsed(text: str, place: str) -> exp.Select:
    try:
        parsed = sqlglot.parse_one(text, read="postgres")
    except (SqlglotError, RecursionError) as error:
        found: Iterator[dict[str, object]] = iter(getattr(error, "errors", ()))
        first = next(found, {})
        where = f", line {first['line']}, column {first['col']}" if first.get("line") else ""
        raise ConfigError(f"{place}{where}: this is no SQL statement.", "Write one SELECT of Postgres.") from None
    if not isinstance(parsed, exp.Select):
        raise ConfigError(f"{place}: a view is one SELECT.", "UNION and other statements are not available.")
    _require_only(parsed, ("expressions", "from_", "joins", "where", "group", "having"), place)
    if group := parsed.args.get("group"):
        _require_only(group, ("expressions",), place)
    return parsed


def _require_only(node: exp.Expr, parts: Sequence[str], place: str) -> None:
    """Refuse every part that is not known: it would be ignored."""
    for name, part in node.args.items():
        if part and name not in parts:
            what = _REFUSED.get(name) or (part.sql("postgres") if isinstance(part, exp.Expr) else name)[:60].strip()
            raise ConfigError(f"{place}: {what} is not available in a view.", "Leave it out; stores sort and limit.")


def _inputs(select: exp.Select, catalog: Catalog, place: str) -> Iterator[Input]:
    source = select.args.get("from_")
    if source is None:
        raise ConfigError(f"{place}: there is no FROM.", "Name a captured table: from public.orders")
    seen: set[str] = set()
    for node in (source.this, *(join.this for join in select.args.get("joins") or ())):
        if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
            raise ConfigError(
                f"{place}: a subquery or a function in FROM is not available.", "Name captured tables in FROM."
            )
        _require_only(node, ("this", "db", "alias"), place)
        if (named := node.args.get("alias")) is not None:
            _require_only(named, ("this",), place)
        table = TableId(node.db or "public", node.name)
        alias = node.alias_or_name
        if alias in seen:
            raise ConfigError(f"{place}: two tables are called {alias}.", f"Name one of them: {table} as other")
        seen.add(alias)
        schema = catalog.schema(table, place)
        types = {f"{alias}.{name}": type_ for name, type_ in columns_of(schema).items()}
        yield Input(alias, table, types, tuple(f"{alias}.{name}" for name in catalog.key(table, place)))


def _conjuncts(node: exp.Expr) -> Iterator[exp.Expr]:
    if isinstance(node, exp.Paren):
        yield from _conjuncts(node.this)
    elif isinstance(node, exp.And):
        yield from _conjuncts(node.this)
        yield from _conjuncts(node.expression)
    else:
        yield node


class _Reader:
    """Resolves the parts of one statement."""

    def __init__(self, text: str, place: str, inputs: Sequence[Input]) -> None:
        self._text, self._place, self._inputs = text, place, inputs
        self._names = [name for each in inputs for name in each.types]

    def expression(self, node: exp.Expr, *, aggregates: bool = False) -> Expression:
        """A part as an expression over qualified columns."""
        tree = node.copy()
        if isinstance(tree, exp.Column):
            tree = exp.Paren(this=tree)
        for column in list(tree.find_all(exp.Column)):
            self._qualify(column)
        tree = tree.this if isinstance(node, exp.Column) else tree
        if aggregates:  # the arguments are checked where the aggregate is compiled
            checked(tree.copy().transform(_without_aggregates), self._text, self._place)
            return Expression(self._text, self._place, tuple(map(column_name, tree.find_all(exp.Column))), tree)
        return checked(tree, self._text, self._place)

    def _qualify(self, column: exp.Column) -> None:
        if isinstance(column.this, exp.Star):
            return
        if column.table:
            return
        found = [name for name in self._names if name.partition(".")[2] == column.name]
        if len(found) > 1:
            whole = Expression(self._text, self._place, (), column)
            raise whole.error(f"{column.name} is in several tables.", f"Write {' or '.join(found)}.", column)
        if found:
            column.set("table", exp.to_identifier(found[0].partition(".")[0], quoted=True))

    def items(self, select: exp.Select) -> Iterator[ResultColumn]:
        """The columns of the result; `*` is every column."""
        seen: set[str] = set()
        for node in select.expressions:
            for name, tree in self._expanded(node):
                if name in seen:
                    raise ConfigError(f"{self._place}: two columns are called {name}.", "Name one: … as other")
                seen.add(name)
                yield ResultColumn(name, self.expression(tree, aggregates=True))

    def _expanded(self, node: exp.Expr) -> Iterator[tuple[str, exp.Expr]]:
        star = isinstance(node, exp.Star)
        if star or (isinstance(node, exp.Column) and isinstance(node.this, exp.Star)):
            alias = "" if star else node.args["table"].name
            for name in self._names:
                table, _, column = name.partition(".")
                if alias in ("", table):
                    yield (
                        column,
                        exp.column(exp.to_identifier(column, quoted=True), exp.to_identifier(table, quoted=True)),
                    )
            return
        name = node.alias_or_name
        if not name:
            whole = Expression(self._text, self._place, (), node)
            raise whole.error("a column of the result has no name.", "Name it: … as total", node)
        yield name, node.this if isinstance(node, exp.Alias) else node

    def group(self, node: exp.Expr, items: Sequence[ResultColumn]) -> Expression:
        """An expression of GROUP BY; the name or number of a column of the result stands for it."""
        if isinstance(node, exp.Literal) and not node.is_string and 1 <= int(node.name) <= len(items):
            return items[int(node.name) - 1].expression
        if isinstance(node, exp.Column) and not node.table:
            known = [name for name in self._names if name.partition(".")[2] == node.name]
            for item in items if not known else ():
                if item.name == node.name:
                    return item.expression
        return self.expression(node)

    def join(self, join: exp.Join, before: Sequence[str], own: str) -> JoinClause:
        """The conditions of a join, by what they refer to."""
        kind: Kind = _KINDS.get(join.side, "inner")
        if join.kind in ("CROSS", "SEMI", "ANTI") or join.args.get("using") or join.args.get("method"):
            raise ConfigError(f"{self._place}: only JOIN … ON is available.", "Write: join b on a.id = b.a_id")
        if not join.args.get("on"):
            raise ConfigError(f"{self._place}: the join of {own} has no ON.", "Write: join b on a.id = b.a_id")
        equal: list[tuple[Expression, Expression]] = []
        alone: list[Expression] = []
        rest: list[Expression] = []
        for node in _conjuncts(join.args["on"]):
            condition = self.expression(node)
            if (pair := self._equality(node, before, own)) is not None:
                equal.append(pair)
            else:
                (alone if aliases_of(condition) <= {own} else rest).append(condition)
        clause = JoinClause(kind, tuple(equal), tuple(alone), tuple(rest))
        self._require_available(clause, own)
        return clause

    def _require_available(self, clause: JoinClause, own: str) -> None:
        if not clause.equal:
            raise ConfigError(
                f"{self._place}: the join of {own} has no equality with a table before it.",
                "Rows are found by equal keys: join b on a.id = b.a_id",
            )
        if clause.kind != "inner" and (clause.rest or (clause.own and clause.kind != "left")):
            bad = (*clause.rest, *clause.own)[0]
            raise bad.error(
                f"an outer join ({clause.kind}) has only equalities, and in a left join conditions on {own}.",
                "Move the condition to WHERE, or join inner.",
                bad.tree,
            )

    def _equality(self, node: exp.Expr, before: Sequence[str], own: str) -> tuple[Expression, Expression] | None:
        if not isinstance(node, exp.EQ):
            return None
        left, right = self.expression(node.this), self.expression(node.expression)
        for one, other in ((left, right), (right, left)):
            if aliases_of(one) and aliases_of(one) <= set(before) and aliases_of(other) == {own}:
                return one, other
        return None


def _without_aggregates(node: exp.Expr) -> exp.Expr:
    return exp.Null() if is_aggregate(node) else node


def aliases_of(expression: Expression) -> set[str]:
    """The tables that an expression refers to."""
    return {name.partition(".")[0] for name in expression.columns}

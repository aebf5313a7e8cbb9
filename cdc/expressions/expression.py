"""Expressions in Postgres's SQL: parsed, and refused where they could not have one value per row.

Only what is listed in `cdc.expressions.functions` is accepted, because the value must be the one that Postgres would
compute. An expression has no position in time: it may be evaluated again for the same row (a replay, a backfill,
`verify`), and must then give the same value.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from cdc.errors import ConfigError
from cdc.expressions.functions import AGGREGATES, CONSTRUCTS, FUNCTION_NAMES, FUNCTIONS, UNSTABLE, UNSTABLE_NAMES


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression; `place` says where it was written, for messages."""

    text: str
    place: str
    columns: tuple[str, ...]
    """The columns that it reads, in order of appearance."""
    tree: exp.Expr = field(repr=False, compare=False, hash=False)

    @property
    def column(self) -> str | None:
        """The column's name, if the expression is nothing but a column."""
        return self.columns[0] if isinstance(self.tree, exp.Column) else None

    def error(self, message: str, remedy: str = "", node: exp.Expr | None = None) -> ConfigError:
        """An error that names the place of this expression, and of a part of it."""
        return ConfigError(f"{self.place}{_position(self.text, node)}: {message}", remedy)


def parse(text: str, place: str, *, aggregates: bool = False) -> Expression:
    """Read an expression. Raises ConfigError with the place, the position in the text and a remedy.

    Unquoted names are folded to lower case, as Postgres does. `aggregates`: sum, count and the like are accepted.
    """
    if not text.strip():
        raise ConfigError(f"{place}: the expression is empty.", "Write an SQL expression, or remove the entry.")
    try:
        parsed = sqlglot.parse_one(text, read="postgres")
    except (SqlglotError, RecursionError) as error:
        raise ConfigError(
            f"{place}{_error_position(error)}: this is no SQL expression.",
            "Write an expression as in a SELECT of Postgres, for instance: price * quantity",
        ) from None
    fold_names(parsed)
    return checked(parsed, text, place, aggregates=aggregates)


def fold_names(tree: exp.Expr) -> None:
    """Make unquoted names lower case, as Postgres does."""
    for identifier in tree.find_all(exp.Identifier):
        if not identifier.quoted:
            identifier.set("this", identifier.name.lower())


def checked(tree: exp.Expr, text: str, place: str, *, aggregates: bool = False) -> Expression:
    """A part of a parsed statement `text` as an expression. Raises ConfigError like `parse`."""
    expression = Expression(text, place, tuple(dict.fromkeys(map(column_name, tree.find_all(exp.Column)))), tree)
    for node in tree.walk():
        _check(expression, node, aggregates)
    return expression


def column_name(column: exp.Column) -> str:
    """The name of a column, with that of its table if it has one (`orders.amount`)."""
    return ".".join(part.name for part in column.parts)


def _check(expression: Expression, node: exp.Expr, aggregates: bool) -> None:
    kind, name = type(node), _name(expression.text, node)
    if kind in CONSTRUCTS or kind in FUNCTIONS or (aggregates and kind in AGGREGATES):
        return
    if kind in AGGREGATES or isinstance(node, exp.AggFunc):
        message = f"{name} needs several rows; an expression here has the columns of one row."
        raise expression.error(message, "Compute it where rows are grouped.", node)
    if isinstance(node, (exp.Query, exp.Exists, exp.Window)):
        message = (
            f"a {'window function' if kind is exp.Window else 'subquery'}; an expression has the columns of one row."
        )
        raise expression.error(message, "Compute it where the rows are read.", node)
    if kind in UNSTABLE or name in UNSTABLE_NAMES:
        message = f"{name} does not give the same value for the same row every time."
        raise expression.error(message, "Use a column of the row, for instance one with the time of its change.", node)
    if isinstance(node, exp.Func):
        near = get_close_matches(name, FUNCTION_NAMES, 3)
        remedy = f"Did you mean {' or '.join(near)}? " if near else ""
        remedy += f"Functions: {', '.join(FUNCTION_NAMES)}."
        raise expression.error(f"the function {name} is not available.", remedy, node)
    message = f"{node.sql('postgres')[:60]!r} is not available in an expression."
    raise expression.error(message, "Available are columns, literals, operators, CASE, casts and functions.", node)


def _name(text: str, node: exp.Expr) -> str:
    """The name of a function as it was written."""
    start, end = node.meta.get("start"), node.meta.get("end")
    written = text[start : end + 1].lower() if start is not None and end is not None else ""
    if written.isidentifier():
        return written
    if isinstance(node, exp.Anonymous):
        return node.name.lower()
    return node.sql_name().lower() if isinstance(node, exp.Func) else node.key


def _position(text: str, node: exp.Expr | None) -> str:
    """The place of a node in the text; of the nearest part of it whose place is known."""
    for part in node.walk(bfs=False) if node is not None else ():
        start = part.meta.get("start")
        if start is not None:
            before = text[:start]
            return f", line {before.count(chr(10)) + 1}, column {start - before.rfind(chr(10))}"
    return ""


def _error_position(error: Exception) -> str:
    found: Iterator[dict[str, int]] = iter(getattr(error, "errors", ()))
    first = next(found, {})
    return f", line {first['line']}, column {first['col']}" if first.get("line") else ""

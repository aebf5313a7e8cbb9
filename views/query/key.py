"""The columns that identify a row of a query's result. Pure."""

from cdc.errors import ConfigError
from views.query.statement import Input, Statement

ONLY_ROW = "id"
"""The key column of a view that has a single row."""


def key_of(statement: Statement, declared: tuple[str, ...], view: str) -> tuple[str, ...]:
    """The names of the key columns, in the order of the result; none: there is a single row. Raises ConfigError if rows
    could not be told apart."""
    names = [item.name for item in statement.items]
    for name in declared:
        if name not in names:
            raise ConfigError(
                f"view {view}: key {name} is no column of the result.", f"Its columns: {', '.join(names)}."
            )
    if declared:
        return tuple(name for name in names if name in declared)
    return _group_key(statement, view) if statement.grouped else _primary_keys(statement, view)


def _group_key(statement: Statement, view: str) -> tuple[str, ...]:
    found = []
    for each in statement.group:
        item = next((item for item in statement.items if item.expression.tree == each.tree), None)
        if item is None:
            raise each.error(
                f"{each.tree.sql('postgres')} is in GROUP BY and not selected: rows could not be told apart.",
                "Select it.",
                each.tree,
            )
        found.append(item.name)
    names = [item.name for item in statement.items]
    if not found and ONLY_ROW in names:
        raise ConfigError(
            f"view {view}: the key of its only row is called {ONLY_ROW}, like a column of the result.",
            "Give the column another name.",
        )
    return tuple(name for name in names if name in found)


def _primary_keys(statement: Statement, view: str) -> tuple[str, ...]:
    selected = {item.expression.column: item.name for item in statement.items if item.expression.column}
    wanted = [name for each in statement.inputs if not _determined(each, statement) for name in each.key]
    kept = [clause for clause in statement.joins if clause.kind in ("inner", "left")]  # in others, one is null alone
    equal = {str(two.column): str(one.column) for clause in kept for one, two in clause.equal}
    found = [selected.get(name) or selected.get(equal.get(name, "")) for name in wanted]
    missing = [name for name, item in zip(wanted, found, strict=True) if item is None]
    if missing:
        raise ConfigError(
            f"view {view}: {missing[0]} is part of the key and not selected: rows could not be told apart.",
            f"Select it ({missing[0]}), or name the columns that identify a row: key: […]",
        )
    return tuple(name for name in selected.values() if name in found)


def _determined(each: Input, statement: Statement) -> bool:
    """Whether the tables before it name its row: it is joined by its whole primary key."""
    number = statement.inputs.index(each) - 1
    if number < 0 or any(clause.kind in ("right", "full") for clause in statement.joins[number:]):
        return False
    return set(each.key) <= {two.column for _, two in statement.joins[number].equal}

"""Queries: a SELECT over captured tables, kept up to date as they change."""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Literal

from cdc.config.settings import ViewSettings
from cdc.errors import ConfigError
from cdc.expressions.column_types import column_of
from cdc.model import Column, TableId, TableSchema
from views.catalog import Catalog
from views.dataflow.changes import TableChanges
from views.dataflow.graph import Graph, Node, Step
from views.dataflow.output import Output
from views.dataflow.rekey import Rekeyed
from views.dataflow.typed import KEY, ONE, Shown
from views.plan import Plan
from views.query.compiled import Compiler, Relation, table_columns
from views.query.statement import Input, Statement, read_statement
from views.query.whole import whole_result


class QuerySettings(ViewSettings):
    """The result of a SELECT over captured tables."""

    kind: Literal["query"] = "query"
    sql: str
    """One SELECT: joins by equal columns (inner, left, right, full), WHERE, GROUP BY, HAVING and aggregates. Every
    column of the result has a name."""
    key: tuple[str, ...] = ()
    """The columns of the result that identify a row. Default: the columns of GROUP BY, or the primary keys of all tables,
    which must then be selected."""


SETTINGS = QuerySettings


def plan(settings: QuerySettings, catalog: Catalog) -> Plan:
    """The plan of a query. Raises ConfigError, which names the view and the place in the statement."""
    statement = read_statement(settings.sql, catalog, f"view {settings.name}, sql")
    columns = table_columns(statement)
    key = _key(settings, statement)
    make = partial(_graph, settings, statement, columns, key)
    types = _types(settings, statement, columns)
    own = tuple(_column(name, type_, name in key) for name, type_ in types.items())
    schema = TableSchema(settings.table, own if key else (ONE, *own))
    definition = hashlib.sha256(f"{settings.sql}|{key}|{columns}|{types}".encode()).hexdigest()[:16]
    referee = partial(whole_result, statement, shown(types, key))
    return Plan(settings.name, columns, schema, make, referee, definition)


def shown(types: Mapping[str, str], key: tuple[str, ...]) -> Shown:
    """How the columns of the result become JSON."""
    return Shown(tuple(types.items()), key, () if key else ((ONE.name, "1"),))


def _column(name: str, type_: str, key: bool) -> Column:
    found = column_of(name, type_)
    return Column(name, found.type, found.modifier, key)


def _key(settings: QuerySettings, statement: Statement) -> tuple[str, ...]:
    names = [item.name for item in statement.items]
    for name in settings.key:
        if name not in names:
            raise ConfigError(
                f"view {settings.name}: key {name} is no column of the result.", f"Its columns: {', '.join(names)}."
            )
    if settings.key:
        return tuple(name for name in names if name in settings.key)
    if statement.grouped:
        return _group_key(settings, statement)
    return _primary_keys(settings, statement)


def _group_key(settings: QuerySettings, statement: Statement) -> tuple[str, ...]:
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
    if not found and ONE.name in [item.name for item in statement.items]:
        raise ConfigError(
            f"view {settings.name}: the key of its only row is called {ONE.name}, like a column of the result.",
            "Give the column another name.",
        )
    return tuple(item.name for item in statement.items if item.name in found)


def _primary_keys(settings: QuerySettings, statement: Statement) -> tuple[str, ...]:
    selected = {item.expression.column: item.name for item in statement.items if item.expression.column}
    wanted = [name for each in statement.inputs if not _determined(each, statement) for name in each.key]
    equal = {str(two.column): str(one.column) for join in statement.joins for one, two in join.equal}
    found = [selected.get(name) or selected.get(equal.get(name, "")) for name in wanted]
    missing = [name for name, item in zip(wanted, found, strict=True) if item is None]
    if missing:
        raise ConfigError(
            f"view {settings.name}: {missing[0]} is part of the key and not selected: rows could not be told apart.",
            f"Select it ({missing[0]}), or name the columns that identify a row: key: […]",
        )
    return tuple(name for name in selected.values() if name in found)


def _determined(each: Input, statement: Statement) -> bool:
    """Whether the tables before it name its row: it is joined by its whole primary key."""
    number = statement.inputs.index(each) - 1
    if number < 0 or any(clause.kind in ("right", "full") for clause in statement.joins[number:]):
        return False
    return set(each.key) <= {two.column for _, two in statement.joins[number].equal}


def _types(settings: QuerySettings, statement: Statement, columns: Mapping[TableId, tuple[str, ...]]) -> dict[str, str]:
    """The types of the result's columns: compiles every expression, so that mistakes are found."""
    return dict(_compiled(_Steps(columns), settings, statement).types)


class _Steps:
    """Collects the steps of a graph."""

    def __init__(self, columns: Mapping[TableId, tuple[str, ...]]) -> None:
        self._tables = list(columns)
        self.inputs = [TableChanges(table, names) for table, names in columns.items()]
        self.nodes: list[Node] = []

    def add(self, name: str, step: Step, sources: object, text: str) -> int:
        """Add a step; returns its number."""
        self.nodes.append(Node(name, step, tuple(sources), text))  # type: ignore[arg-type]
        return len(self.inputs) + len(self.nodes) - 1

    def input(self, table: TableId) -> int:
        """The number of a table's changes."""
        return self._tables.index(table)


def _compiled(steps: _Steps, settings: QuerySettings, statement: Statement) -> Relation:
    compiler = Compiler(statement, settings.name, steps.add, steps.input)
    rows, rest = compiler.joined()
    return compiler.grouped(rows, rest) if statement.grouped else compiler.selected(rows, rest)


def _graph(
    settings: QuerySettings, statement: Statement, columns: Mapping[TableId, tuple[str, ...]], key: tuple[str, ...]
) -> Graph:
    steps = _Steps(columns)
    result = _compiled(steps, settings, statement)
    rows = steps.add("rows", shown(result.types, key), [result.at], "")
    steps.add(settings.name, Rekeyed(KEY, settings.name), [rows], f"one row per {', '.join(key) or 'view'}")
    return Graph(steps.inputs, steps.nodes, Output(settings.table))

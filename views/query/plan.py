"""Queries: a SELECT over captured tables, kept up to date as they change."""

import hashlib
from collections.abc import Mapping
from functools import partial

from cdc.expressions.column_types import column_of
from cdc.model import Column, PgType, TableId, TableSchema
from views.catalog import Catalog
from views.dataflow.changes import captured
from views.dataflow.graph import Graph, GraphBuilder
from views.dataflow.output import Output
from views.dataflow.rekey import Rekeyed
from views.dataflow.typed import KEY, Shown
from views.plan import ViewPlan
from views.query.compiled import Relation, add_statement, table_columns
from views.query.key import ONLY_ROW, key_of
from views.query.settings import QuerySettings
from views.query.statement import Statement, read_statement
from views.query.whole import whole_result

_ONLY_ROW = Column(ONLY_ROW, PgType(23, "int4"), key=True)


def plan(settings: QuerySettings, catalog: Catalog) -> ViewPlan:
    """The plan of a query. Raises ConfigError, which names the view and the place in the statement."""
    statement = read_statement(settings.sql, catalog, f"view {settings.name}, sql")
    columns = table_columns(statement)
    key = key_of(statement, settings.key, settings.name)
    types = add_statement(
        GraphBuilder(captured(columns)), statement, settings.name
    ).types  # compiled once to find mistakes
    schema = TableSchema(settings.table, row_columns(types, key))
    definition = hashlib.sha256(f"{settings.sql}|{key}|{columns}|{types}".encode()).hexdigest()[:16]
    make = partial(_graph, settings, statement, columns, key)
    referee = partial(whole_result, statement, _shown(types, key))
    return ViewPlan(settings.name, columns, schema, make, referee, definition)


def row_columns(types: Mapping[str, str], key: tuple[str, ...]) -> tuple[Column, ...]:
    """The columns of rows with these types."""
    found = [(name in key, column_of(name, type_)) for name, type_ in types.items()]
    own = tuple(Column(column.name, column.type, column.modifier, of_key) for of_key, column in found)
    return own if key else (_ONLY_ROW, *own)


def _shown(types: Mapping[str, str], key: tuple[str, ...]) -> Shown:
    """How the columns of the result become JSON."""
    return Shown(tuple(types.items()), key, () if key else ((ONLY_ROW, "1"),))


def _graph(
    settings: QuerySettings, statement: Statement, columns: Mapping[TableId, tuple[str, ...]], key: tuple[str, ...]
) -> Graph:
    steps = GraphBuilder(captured(columns))
    result: Relation = add_statement(steps, statement, settings.name)
    rows = steps.add("rows", _shown(result.types, key).step, [result.at])
    text = f"one row per {', '.join(key) or 'view'}"
    steps.add(settings.name, Rekeyed(KEY, settings.name).step, [rows], text)
    return steps.built(Output(settings.table))

"""Windows: aggregates of a table's rows by event time, which stay right when rows come late or are corrected."""

import hashlib
from functools import partial

from cdc.model import TableSchema
from views.catalog import Catalog
from views.dataflow.graph import Graph
from views.plan import ViewPlan
from views.query.plan import row_columns
from views.windows.settings import WindowedSettings
from views.windows.source import WindowSource, read_source
from views.windows.steps import WindowSteps


def plan(settings: WindowedSettings, catalog: Catalog) -> ViewPlan:
    """The plan of windows. Raises ConfigError, which names the view and the place."""
    source = read_source(settings, catalog)
    types = WindowSteps(source).types  # built once to find mistakes
    schema = TableSchema(settings.table, row_columns(types, source.key))
    definition = hashlib.sha256(f"{settings.model_dump_json()}|{types}".encode()).hexdigest()[:16]
    return ViewPlan(settings.name, source.columns, schema, partial(_graph, source), None, definition)


def _graph(source: WindowSource) -> Graph:
    return WindowSteps(source).graph()

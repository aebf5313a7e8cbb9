"""Documents: a row of a table with the rows that belong to it in other tables, as one nested row.

A document changes when any of its parts does. The affected documents are found by the keys of the changed parts, which
the state keeps; no step reads a whole table. A part that comes before the row that it belongs to waits in the state.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from cdc.errors import ConfigError
from cdc.model import Column, PgType, TableId, TableSchema
from views.catalog import Catalog
from views.dataflow.changes import captured
from views.dataflow.graph import Graph, GraphBuilder
from views.dataflow.output import Output
from views.documents.parts import Part, needed_columns, read_part
from views.documents.settings import DocumentSettings
from views.documents.steps import add_documents
from views.documents.whole import documents_query, whole_documents
from views.plan import ViewPlan

_JSONB = PgType(3802, "jsonb")


def plan(settings: DocumentSettings, catalog: Catalog) -> ViewPlan:
    """The plan of a document view. Raises ConfigError, which names the view and the place."""
    place = f"view {settings.name}"
    key = catalog.key(settings.root, place)
    root = read_part(settings.root, settings.columns, settings.include, catalog, place)
    missing = [name for name in key if name not in root.columns]
    if missing:
        raise ConfigError(f"{place}: the key column {missing[0]} is not among its columns.", "Add it to `columns`.")
    columns = {table: tuple(sorted(names)) for table, names in needed_columns(root).items()}
    query = documents_query(root)
    digest = hashlib.sha256(json.dumps([repr(root), query]).encode()).hexdigest()[:16]
    make = partial(_graph, settings, root, columns)
    schema = _row_schema(settings, root, catalog)
    return ViewPlan(settings.name, columns, schema, make, partial(whole_documents, query), digest)


def _row_schema(settings: DocumentSettings, root: Part, catalog: Catalog) -> TableSchema:
    of_table = {column.name: column for column in catalog.schema(settings.root, "").columns}
    own = [replace(of_table[name], key=name in root.key) for name in root.columns]
    nested = [Column(name, _JSONB) for name, _, _ in root.children]
    return TableSchema(settings.table, (*own, *nested))


def _graph(settings: DocumentSettings, root: Part, columns: Mapping[TableId, tuple[str, ...]]) -> Graph:
    steps = GraphBuilder(captured(columns))
    add_documents(steps, root, settings.name)
    return steps.built(Output(settings.table))

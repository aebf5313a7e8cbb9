"""Documents: a row of a table with the rows that belong to it in other tables, as one nested row.

A document changes when any of its parts does. The affected documents are found by the keys of the changed parts, which
the state keeps; no step reads a whole table. A part that comes before the row that it belongs to waits in the state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

import pyarrow as pa

from cdc.config.settings import Section, TableField, ViewSettings
from cdc.errors import ConfigError
from cdc.expressions import engine
from cdc.json_text.members import quote
from cdc.model import Column, ForeignKey, PgType, TableId, TableSchema
from views.catalog import Catalog
from views.dataflow.cells import Member, Renamed, Selected
from views.dataflow.changes import TableChanges
from views.dataflow.collect import INPUT, ITEM, KEY, LIST, ORDER, Collect
from views.dataflow.delta import ID
from views.dataflow.graph import Graph, Node, Step
from views.dataflow.join import Join, Side
from views.dataflow.output import ROW, Output
from views.dataflow.rekey import Rekeyed
from views.plan import Plan

_JSONB = PgType(3802, "jsonb")
_TEXT = pa.string()


class IncludeSettings(Section):
    """A table whose rows are part of the document."""

    table: TableField
    """The table as schema.name."""
    name: str = ""
    """The member of the document; defaults to the table's name."""
    columns: tuple[str, ...] = ()
    """Columns to include; empty means all."""
    through: TableField | None = None
    """For many-to-many: the table that links the two."""
    match: dict[str, str] = {}
    """Columns of this table and the columns of the outer table that they equal; empty: by the foreign key between them."""
    order_by: str = ""
    """The column that orders the array; empty: the key."""
    include: tuple[IncludeSettings, ...] = ()
    """Tables whose rows are part of this one's."""


class DocumentSettings(ViewSettings):
    """Rows of one table with the rows of other tables that belong to them, as nested JSON."""

    kind: Literal["documents"] = "documents"
    root: TableField
    """The table with one row per document, as schema.name."""
    columns: tuple[str, ...] = ()
    """Columns of the document; empty means all."""
    include: tuple[IncludeSettings, ...] = ()
    """Tables whose rows are part of the document."""


SETTINGS = DocumentSettings


def plan(settings: DocumentSettings, catalog: Catalog) -> Plan:
    """The plan of a document view. Raises ConfigError, which names the view and the place."""
    place = f"view {settings.name}"
    key = catalog.key(settings.root, place)
    root = _part(settings.root, settings.columns, settings.include, catalog, place)
    missing = [name for name in key if name not in root.columns]
    if missing:
        raise ConfigError(f"{place}: the key column {missing[0]} is not among its columns.", "Add it to `columns`.")
    schema = _row_schema(settings, root, catalog)
    columns = {table: tuple(sorted(names)) for table, names in _needed(root).items()}
    referee = f"select {_quoted(ID)}, {_quoted('_doc')} as {_quoted(ROW)} from ({_sql(root, ())})"
    definition = json.dumps([repr(root), referee], sort_keys=True)
    digest = hashlib.sha256(definition.encode()).hexdigest()[:16]
    make = partial(_graph, settings, root, columns)
    return Plan(settings.name, columns, schema, make, partial(_whole, referee), digest)


@dataclass(frozen=True, slots=True)
class _Match:
    """How the rows of a part find the row that they belong to: pairs of own column and outer column."""

    own: tuple[str, ...]
    outer: tuple[str, ...]
    many: bool
    link: TableId | None = None
    """The table between the two; `own` are then its columns, and `link_columns` and `far` join it with the part."""
    link_columns: tuple[str, ...] = ()
    far: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """A table in the document, with what belongs to its rows."""

    table: TableId
    columns: tuple[str, ...]
    key: tuple[str, ...]
    children: tuple[tuple[str, _Match, _Part], ...] = ()
    order_by: str = ""


def _part(
    table: TableId, columns: tuple[str, ...], include: Sequence[IncludeSettings], catalog: Catalog, place: str
) -> _Part:
    for name in columns:
        catalog.column(table, name, place)
    shown = columns or tuple(column.name for column in catalog.schema(table, place).columns)
    children = []
    for item in include:
        name = item.name or item.table.name
        inner = f"{place}, include {name}"
        if name in shown or name in [known for known, _, _ in children]:
            raise ConfigError(f"{inner}: {table} has another member {name}.", "Give it another `name`.")
        child = _part(item.table, item.columns, item.include, catalog, inner)
        match = _match(table, item, catalog, inner)
        children.append((name, match, replace(child, order_by=_order(item, match, child, catalog, inner))))
    return _Part(table, shown, catalog.key(table, place), tuple(children))


def _order(item: IncludeSettings, match: _Match, child: _Part, catalog: Catalog, place: str) -> str:
    """The column that orders the array: of the key, the first one that differs within an array."""
    if item.order_by:
        catalog.column(item.table, item.order_by, place)
        return item.order_by
    own = () if match.link else match.own
    return next((name for name in child.key if name not in own), child.key[0])


def _match(outer: TableId, item: IncludeSettings, catalog: Catalog, place: str) -> _Match:
    if item.through is not None:
        return _linked(outer, item, item.through, catalog, place)
    if item.match:
        for own, other in item.match.items():
            catalog.column(item.table, own, place)
            catalog.column(outer, other, place)
        columns = tuple(item.match), tuple(item.match.values())
        return _Match(*columns, many=set(catalog.key(item.table, place)) != set(columns[0]))
    down = [key for key in catalog.foreign_keys if (key.table, key.parent) == (item.table, outer)]
    up = [key for key in catalog.foreign_keys if (key.table, key.parent) == (outer, item.table)]
    _one_key([*down, *up], item.table, outer, place)
    if down:
        many = set(catalog.key(item.table, place)) != set(down[0].columns)
        return _Match(down[0].columns, down[0].parent_columns, many=many)
    return _Match(up[0].parent_columns, up[0].columns, many=False)


def _linked(outer: TableId, item: IncludeSettings, link: TableId, catalog: Catalog, place: str) -> _Match:
    catalog.schema(link, place)
    near = [key for key in catalog.foreign_keys if (key.table, key.parent) == (link, outer)]
    far = [key for key in catalog.foreign_keys if (key.table, key.parent) == (link, item.table)]
    _one_key(near, link, outer, place)
    _one_key(far, link, item.table, place)
    return _Match(near[0].columns, near[0].parent_columns, True, link, far[0].columns, far[0].parent_columns)


def _one_key(found: Sequence[ForeignKey], left: TableId, right: TableId, place: str) -> None:
    if not found:
        raise ConfigError(
            f"{place}: there is no foreign key between {left} and {right}.",
            "Name the columns that are equal: match: {column of the included table: column of the outer table}",
        )
    if len(found) > 1:
        listed = "; ".join(f"{key.table} ({', '.join(key.columns)})" for key in found)
        raise ConfigError(
            f"{place}: there are several foreign keys between {left} and {right}: {listed}.",
            "Choose one: match: {column of the included table: column of the outer table}",
        )


def _row_schema(settings: DocumentSettings, root: _Part, catalog: Catalog) -> TableSchema:
    of_table = {column.name: column for column in catalog.schema(settings.root, "").columns}
    own = [replace(of_table[name], key=name in root.key) for name in root.columns]
    nested = [Column(name, _JSONB) for name, _, _ in root.children]
    return TableSchema(settings.table, (*own, *nested))


def _needed(part: _Part, more: Iterable[str] = ()) -> dict[TableId, set[str]]:
    """The columns that are needed of each table."""
    found = {part.table: {*part.columns, *part.key, *more, *filter(None, [part.order_by])}}
    for _, match, child in part.children:
        found[part.table] |= set(match.outer)
        needed = [_needed(child, match.far if match.link else match.own)]
        if match.link:
            needed.append({match.link: {*match.own, *match.link_columns}})
        for table, columns in chain.from_iterable(each.items() for each in needed):
            found[table] = found.get(table, set()) | columns
    return found


class _Steps:
    """Collects the steps of a graph. Numbers are those of `Node.sources`."""

    def __init__(self, columns: Mapping[TableId, tuple[str, ...]]) -> None:
        self._tables = list(columns)
        self.inputs = [TableChanges(table, names) for table, names in columns.items()]
        self.nodes: list[Node] = []

    def input(self, table: TableId) -> int:
        """The changes of a captured table."""
        return self._tables.index(table)

    def add(self, name: str, step: Step, sources: Sequence[int], text: str) -> int:
        """Add a step; returns its number."""
        self.nodes.append(Node(name, step, tuple(sources), text))
        return len(self.inputs) + len(self.nodes) - 1


def _graph(settings: DocumentSettings, root: _Part, columns: Mapping[TableId, tuple[str, ...]]) -> Graph:
    steps = _Steps(columns)
    documents = _branch(steps, root, settings.name, root.key)
    key = tuple(Member(name, name) for name in root.key)
    keyed = Selected((ITEM,), objects=(("_key", key),))
    named = steps.add(f"{settings.name} key", keyed, [documents], "")
    rows = steps.add(f"{settings.name} rows", Renamed(((ITEM, ROW), ("_key", "_key"))), [named], "")
    steps.add(settings.name, Rekeyed("_key", settings.name), [rows], f"one document per row of {root.table}")
    return Graph(steps.inputs, steps.nodes, Output(settings.table))


def _branch(steps: _Steps, part: _Part, path: str, need: Sequence[str]) -> int:
    """The rows of a part as JSON objects (ITEM), with ORDER and the cells of the columns `need`."""
    cells = sorted({*part.columns, *need, *part.key, *filter(None, [part.order_by])})
    keys = tuple((f"_outer{number}", match.outer) for number, (_, match, _) in enumerate(part.children))
    at = steps.add(f"{path} cells", Selected(tuple(cells), keys), [steps.input(part.table)], f"reads {part.table}")
    held = pa.schema([(name, _TEXT) for name in (*cells, *(name for name, _ in keys))])
    members = [Member(name, name) for name in part.columns]
    for number, (name, match, child) in enumerate(part.children):
        inner = f"{path}.{name}"
        found = _branch(steps, child, inner, match.far if match.link else match.own)
        right, text = _matched(steps, found, match, inner)
        own = Side(f"_outer{number}", held, tuple(held.names))
        joined = Join(own, replace(right, names=("", f"_member{number}")), "left")
        at = steps.add(f"{inner} in {path}", joined, [at, len(steps.inputs) + len(steps.nodes) - 1], text)
        held = joined.schema
        members.append(Member(name, f"_member{number}", "[]" if match.many else "null"))
    numbers = ((ORDER, part.order_by or part.key[0]),)
    document = Selected(tuple(dict.fromkeys(need)), objects=((ITEM, tuple(members)),), numbers=numbers)
    return steps.add(f"{path} document", document, [at], f"{part.table} as a JSON object")


def _matched(steps: _Steps, found: int, match: _Match, path: str) -> tuple[Side, str]:
    """The last step gives, for each row that a part belongs to, what the document shows of the part."""
    if match.link is not None:
        found = _through(steps, found, match, match.link, path)
    elif match.many:
        keyed = Selected((ORDER, ITEM), ((KEY, match.own),))
        found = steps.add(f"{path} by row", keyed, [found], "")
    else:
        steps.add(f"{path} by row", Selected((ITEM,), ((KEY, match.own),)), [found], "")
        one = pa.schema([(KEY, _TEXT), (ITEM, _TEXT)])
        return Side(
            KEY, one, ()
        ), f"each row gets its {path.rpartition('.')[2]}, looked up by ({', '.join(match.outer)})"
    steps.add(f"{path} list", Collect(), [found], f"collects {path.rpartition('.')[2]} by ({', '.join(match.own)})")
    many = pa.schema([(KEY, _TEXT), (LIST, _TEXT)])
    return Side(KEY, many, ()), f"each row gets its {path.rpartition('.')[2]}, looked up by ({', '.join(match.outer)})"


def _through(steps: _Steps, found: int, match: _Match, link: TableId, path: str) -> int:
    """The rows of a part by the rows that a linking table names."""
    ends = Selected((), ((KEY, match.own), ("_far", match.link_columns)))
    links = steps.add(f"{path} links", ends, [steps.input(link)], f"reads {link}")
    far = steps.add(f"{path} by link", Selected((ORDER, ITEM), (("_far", match.far),)), [found], "")
    left = Side("_far", pa.schema([(KEY, _TEXT), ("_far", _TEXT)]), (KEY, ""))
    right = Side("_far", pa.schema([("_far", _TEXT), *list(INPUT)[1:]]), ("", ORDER, ITEM))
    return steps.add(f"{path} through {link.name}", Join(left, right, "inner"), [links, far], f"joins {link}")


def _whole(query: str, tables: Mapping[TableId, pa.Table]) -> pa.Table:
    """The documents by DuckDB's own joins."""
    connection = engine.cursor()
    for table, cells in tables.items():
        connection.register(str(table), cells)
    found: pa.Table = connection.sql(query).to_arrow_table()
    return found


def _sql(part: _Part, need: Sequence[str]) -> str:
    """The same rows by a query over the captured tables, whose columns are cells."""
    members = [f"{_literal(quote(name) + ':')} || coalesce(t.{_quoted(name)}, 'null')" for name in part.columns]
    for name, match, child in part.children:
        members.append(f"{_literal(quote(name) + ':')} || {_member_sql(match, child)}")
    number = f"coalesce(try_cast(t.{_quoted(part.order_by or part.key[0])} as double), 0)"
    columns = "".join(f", t.{_quoted(name)}" for name in dict.fromkeys(need))
    body = " || ',' || ".join(members)
    return f"""select t."_id", '{{' || {body} || '}}' as "_doc", {number} as "_order"{columns} from {_quoted(str(part.table))} t"""


def _member_sql(match: _Match, child: _Part) -> str:
    def equal(left: str, right: str, names: tuple[str, ...], others: tuple[str, ...]) -> str:
        pairs = zip(names, others, strict=True)
        return " and ".join(f"{left}.{_quoted(own)} = {right}.{_quoted(other)}" for own, other in pairs)

    if not match.many:
        rows = f"({_sql(child, match.own)}) c where {equal('c', 't', match.own, match.outer)}"
        return f"""coalesce((select c."_doc" from {rows}), 'null')"""
    if match.link is None:
        source, order = f"({_sql(child, match.own)}) c where {equal('c', 't', match.own, match.outer)}", 'c."_id"'
    else:
        source = (
            f"({_sql(child, match.far)}) c join {_quoted(str(match.link))} l on"
            f" {equal('l', 'c', match.link_columns, match.far)} where {equal('l', 't', match.own, match.outer)}"
        )
        order = 'l."_id" || chr(31) || c."_id"'
    listed = f"""'[' || string_agg(c."_doc", ',' order by c."_order", {order}) || ']'"""
    return f"coalesce((select {listed} from {source}), '[]')"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

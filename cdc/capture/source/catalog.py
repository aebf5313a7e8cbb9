"""Tables and types as the source's catalog has them. Read only; every name is passed as a parameter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from cdc.capture.source import keys
from cdc.capture.source.connect import explained
from cdc.capture.source.keys import UniqueIndex
from cdc.model import Column, PgType, TableId, TableSchema, TypeKind

Connection = psycopg.Connection[tuple[Any, ...]]

_KINDS = {"r": "table", "p": "partitioned table", "v": "view", "m": "materialized view", "f": "foreign table"}


@dataclass(frozen=True, slots=True)
class TableFacts:
    """One table in the catalog. `columns` are those that Postgres publishes: without the generated ones."""

    oid: int
    table: TableId
    kind: str
    persistence: str
    identity: str
    columns: tuple[str, ...]
    generated: tuple[str, ...]
    indexes: tuple[UniqueIndex, ...]
    row_security: bool
    readable: bool
    server: int
    """The server's version: what it can publish depends on it."""
    has_children: bool = False
    """Whether other tables inherit from it, partitions excluded."""
    leaf_of: TableId | None = None

    @property
    def kind_name(self) -> str:
        """The kind of relation, for messages."""
        prefix = {"u": "unlogged ", "t": "temporary "}.get(self.persistence, "")
        return prefix + _KINDS.get(self.kind, "relation")

    @property
    def publishable(self) -> bool:
        """Whether Postgres can publish it."""
        return self.kind in "rp" and self.persistence == "p"

    @property
    def identity_columns(self) -> tuple[str, ...]:
        """See `keys.identity_columns`; empty: UPDATE and DELETE cannot be published."""
        return keys.identity_columns(self.identity, self.indexes, self.columns)

    @property
    def key(self) -> tuple[str, ...]:
        """See `keys.key`; empty: the whole row is the key."""
        return keys.key(self.identity, self.indexes, self.columns)


_NAMED = """unnest(%(schemas)s::text[], %(names)s::text[]) as w(schema, name)
    join pg_catalog.pg_namespace n on n.nspname = w.schema
    join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name"""
_NUMBERED = """pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace and c.oid = %(oid)s"""
_LEAVES = """
  union
  select l.relid::oid, n.nspname, c.relname, w.nspname, w.relname
    from wanted w, pg_catalog.pg_partition_tree(w.oid) l
    join pg_catalog.pg_class c on c.oid = l.relid join pg_catalog.pg_namespace n on n.oid = c.relnamespace
   where l.isleaf and l.relid <> w.oid"""
_FACTS = """
with wanted as (
  select c.oid, n.nspname, c.relname, null::text as root_schema, null::text as root_name
    from {wanted}
   where c.relkind = any('{{r,p,v,m,f}}')
), found as (
  select * from wanted {leaves}
)
select f.oid, f.nspname, f.relname, c.relkind::text, c.relpersistence::text, c.relreplident::text,
       columns.published, columns.generated, indexes.facts, c.relrowsecurity, has_table_privilege(f.oid, 'select'),
       c.relkind = 'r' and exists (select from pg_catalog.pg_inherits h where h.inhparent = f.oid),
       f.root_schema, f.root_name
  from found f join pg_catalog.pg_class c on c.oid = f.oid
  left join lateral (
    select array_agg(a.attname::text order by a.attnum) filter (where a.attgenerated = '') as published,
           array_agg(a.attname::text order by a.attnum) filter (where a.attgenerated <> '') as generated
      from pg_catalog.pg_attribute a where a.attrelid = f.oid and a.attnum > 0 and not a.attisdropped) columns on true
  left join lateral (
    select jsonb_agg(jsonb_build_array(x.relname, part.names, i.indisprimary, i.indisreplident, i.indimmediate,
             part.not_null) order by i.indisprimary desc, x.relname) as facts
      from pg_catalog.pg_index i join pg_catalog.pg_class x on x.oid = i.indexrelid
     cross join lateral (
       select array_agg(a.attname::text order by k.place) as names, bool_and(a.attnotnull) as not_null
         from unnest(i.indkey) with ordinality as k(attnum, place)
         join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
        where k.place <= i.indnkeyatts) part
     where i.indrelid = f.oid and i.indisunique and i.indisvalid and i.indpred is null and i.indexprs is null
    ) indexes on true
 order by f.nspname, f.relname
"""


def tables(connection: Connection, names: Iterable[TableId], *, leaves: bool = True) -> list[TableFacts]:
    """The named tables that exist, and their leaf partitions. Names that do not exist are left out."""
    wanted = list(names)
    given = {"schemas": [name.schema for name in wanted], "names": [name.name for name in wanted]}
    return _found(connection, _FACTS.format(wanted=_NAMED, leaves=_LEAVES if leaves else ""), given)


def table(connection: Connection, oid: int) -> TableFacts | None:
    """A table by its oid; None: it was dropped."""
    return next(iter(_found(connection, _FACTS.format(wanted=_NUMBERED, leaves=""), {"oid": oid})), None)


def _found(connection: Connection, query: str, given: Mapping[str, object]) -> list[TableFacts]:
    with explained("Reading the catalog"):
        rows = connection.execute(query.encode(), given).fetchall()
    return [_facts(row, connection.info.server_version) for row in rows]


def _facts(row: tuple[Any, ...], server: int) -> TableFacts:
    oid, schema, name, kind, persistence, identity, columns, generated, indexes, secured, readable, children = row[:12]
    return TableFacts(
        oid=oid,
        table=TableId(schema, name),
        kind=kind,
        persistence=persistence,
        identity=identity,
        columns=tuple(columns or ()),
        generated=tuple(generated or ()),
        indexes=tuple(UniqueIndex(name, tuple(names), *flags) for name, names, *flags in indexes or ()),
        row_security=secured,
        readable=readable,
        server=server,
        has_children=children,
        leaf_of=TableId(row[12], row[13]) if row[12] is not None else None,
    )


_TYPES = """
with recursive needed as (
  select t.oid from pg_catalog.pg_type t where t.oid = any(%(oids)s::oid[])
  union
  select e.oid from needed n join pg_catalog.pg_type t on t.oid = n.oid
    join pg_catalog.pg_type e on e.oid = case when t.typtype = 'd' then t.typbasetype
      when t.typcategory = 'A' and t.typelem <> 0 then t.typelem else 0 end
)
select t.oid, t.typname::text, t.typtype::text, t.typcategory::text, t.typelem, t.typbasetype, t.typdelim::text
  from needed join pg_catalog.pg_type t using (oid)
"""
_TYPE_KINDS = {
    "e": TypeKind.ENUM,
    "d": TypeKind.DOMAIN,
    "c": TypeKind.COMPOSITE,
    "r": TypeKind.RANGE,
    "m": TypeKind.MULTIRANGE,
}


def types(connection: Connection, oids: Iterable[int]) -> dict[int, PgType]:
    """Types by oid, arrays with their element type and domains with their base type. Unknown oids are left out."""
    with explained("Reading the catalog"):
        rows = {row[0]: row for row in connection.execute(_TYPES, {"oids": sorted(set(oids))}).fetchall()}
    return {oid: _built(oid, rows) for oid in rows}


def _built(oid: int, rows: Mapping[int, tuple[Any, ...]]) -> PgType:
    _, name, kind, category, element, parent, delimiter = rows[oid]
    if kind == "d":
        return PgType(oid, name, TypeKind.DOMAIN, _built(parent, rows), delimiter)
    if category == "A" and element:
        return PgType(oid, name, TypeKind.ARRAY, _built(element, rows))
    return PgType(oid, name, _TYPE_KINDS.get(kind, TypeKind.BASE), None, delimiter)


_COLUMNS = """
select a.attname::text, a.atttypid, a.atttypmod from pg_catalog.pg_attribute a
 where a.attrelid = %s and a.attnum > 0 and not a.attisdropped and a.attgenerated = '' order by a.attnum
"""


def schema(connection: Connection, facts: TableFacts) -> TableSchema:
    """A table's schema as the stream sends it: no generated columns; without a key the whole row is the key."""
    with explained("Reading the catalog"):
        rows = connection.execute(_COLUMNS, (facts.oid,)).fetchall()
    known = types(connection, (row[1] for row in rows))
    key = facts.key or (facts.columns if facts.identity == keys.FULL else ())
    columns = tuple(Column(name, known[oid], modifier, name in key) for name, oid, modifier in rows)
    return TableSchema(facts.table, columns, oid=facts.oid, identity=facts.identity)


_ANCESTORS = """
select n.nspname::text, c.relname::text, an.nspname::text, ac.relname::text
  from unnest(%(schemas)s::text[], %(names)s::text[]) as w(schema, name)
  join pg_catalog.pg_namespace n on n.nspname = w.schema
  join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name and c.relispartition
 cross join lateral pg_catalog.pg_partition_ancestors(c.oid) with ordinality a(relid, place)
  join pg_catalog.pg_class ac on ac.oid = a.relid and ac.oid <> c.oid
  join pg_catalog.pg_namespace an on an.oid = ac.relnamespace
 order by a.place
"""


def ancestors(connection: Connection, names: Iterable[TableId]) -> dict[TableId, list[TableId]]:
    """The partitioned tables above each of these tables that is a partition, the root last."""
    wanted = list(names)
    keys = {"schemas": [name.schema for name in wanted], "names": [name.name for name in wanted]}
    found: dict[TableId, list[TableId]] = {}
    with explained("Reading the catalog"):
        for schema, name, *above in connection.execute(_ANCESTORS, keys).fetchall():
            found.setdefault(TableId(schema, name), []).append(TableId(*above))
    return found


def relation(table: TableId) -> sql.Identifier:
    """The table's quoted name in a composed statement."""
    return sql.Identifier(table.schema, table.name)

"""What the source's catalog says of tables and types. Reads only; every name goes in as a parameter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from cdc.capture.connect import explained
from cdc.model import Column, PgType, TableId, TableSchema, TypeKind

Connection = psycopg.Connection[tuple[Any, ...]]

_KINDS = {"r": "table", "p": "partitioned table", "v": "view", "m": "materialized view", "f": "foreign table"}


@dataclass(frozen=True, slots=True)
class TableFacts:
    """One table as the catalog has it. `identity_columns` is empty where UPDATE and DELETE could not be published."""

    oid: int
    table: TableId
    kind: str
    persistence: str
    identity: str
    identity_columns: tuple[str, ...]
    primary_key: tuple[str, ...]
    columns: tuple[str, ...]
    candidate_index: str
    """A unique index over NOT NULL columns that could serve as the identity; empty: none."""
    row_security: bool
    readable: bool
    leaf_of: TableId | None = None

    @property
    def kind_name(self) -> str:
        """For messages."""
        prefix = {"u": "unlogged ", "t": "temporary "}.get(self.persistence, "")
        return prefix + _KINDS.get(self.kind, "relation")

    @property
    def publishable(self) -> bool:
        """Whether Postgres can publish it at all."""
        return self.kind in "rp" and self.persistence == "p"


_FACTS = """
with recursive wanted as (
  select c.oid, n.nspname, c.relname, null::text as root_schema, null::text as root_name
    from unnest(%(schemas)s::text[], %(names)s::text[]) as w(schema, name)
    join pg_catalog.pg_namespace n on n.nspname = w.schema
    join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name
   where c.relkind = any('{r,p,v,m,f}')
), found as (
  select * from wanted
  union
  select l.relid::oid, n.nspname, c.relname, w.nspname, w.relname
    from wanted w, pg_catalog.pg_partition_tree(w.oid) l
    join pg_catalog.pg_class c on c.oid = l.relid join pg_catalog.pg_namespace n on n.oid = c.relnamespace
   where l.isleaf and l.relid <> w.oid
)
select f.oid, f.nspname, f.relname, c.relkind::text, c.relpersistence::text, c.relreplident::text,
       case c.relreplident
         when 'f' then columns.names when 'n' then null
         when 'i' then (select indexed.names where identity.indexrelid is not null)
         else primary_key.names end,
       primary_key.names, columns.names, coalesce(candidate.name, ''), c.relrowsecurity,
       has_table_privilege(f.oid, 'select'), f.root_schema, f.root_name
  from found f join pg_catalog.pg_class c on c.oid = f.oid
  left join pg_catalog.pg_index identity
    on identity.indrelid = f.oid and identity.indisreplident and identity.indisvalid
  left join lateral (select array_agg(a.attname::text order by a.attnum) as names from pg_catalog.pg_attribute a
    where a.attrelid = f.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = '') columns on true
  left join lateral (select array_agg(a.attname::text order by a.attnum) as names from pg_catalog.pg_attribute a
    where a.attrelid = f.oid and a.attnum = any(identity.indkey)) indexed on true
  left join lateral (select array_agg(a.attname::text order by a.attnum) as names from pg_catalog.pg_index i
    join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = any(i.indkey)
    where i.indrelid = f.oid and i.indisprimary) primary_key on true
  left join lateral (select x.relname::text as name from pg_catalog.pg_index i
    join pg_catalog.pg_class x on x.oid = i.indexrelid
    where i.indrelid = f.oid and i.indisunique and i.indimmediate and i.indisvalid and i.indpred is null
      and i.indexprs is null and not exists (select from pg_catalog.pg_attribute a where a.attrelid = f.oid
        and a.attnum = any(i.indkey) and not a.attnotnull)
    order by i.indisprimary desc, x.relname limit 1) candidate on true
 order by f.nspname, f.relname
"""


def tables(connection: Connection, names: Iterable[TableId]) -> list[TableFacts]:
    """The named tables that exist, and every leaf partition below them. A name that is missing is simply not there."""
    wanted = list(names)
    keys = {"schemas": [name.schema for name in wanted], "names": [name.name for name in wanted]}
    with explained("Reading the catalog"):
        rows = connection.execute(_FACTS, keys).fetchall()
    return [_facts(row) for row in rows]


def _facts(row: tuple[Any, ...]) -> TableFacts:
    oid, schema, name, kind, persistence, identity, identified, primary, columns, candidate, secured, readable = row[
        :12
    ]
    root = TableId(row[12], row[13]) if row[12] is not None else None
    return TableFacts(
        oid=oid,
        table=TableId(schema, name),
        kind=kind,
        persistence=persistence,
        identity=identity,
        identity_columns=tuple(identified or ()),
        primary_key=tuple(primary or ()),
        columns=tuple(columns or ()),
        candidate_index=candidate,
        row_security=secured,
        readable=readable,
        leaf_of=root,
    )


_TYPES = """
with recursive needed as (
  select t.oid from pg_catalog.pg_type t where t.oid = any(%(oids)s::oid[])
  union
  select e.oid from needed n join pg_catalog.pg_type t on t.oid = n.oid
    join pg_catalog.pg_type e on e.oid = case when t.typtype = 'd' then t.typbasetype
      when t.typcategory = 'A' and t.typelem <> 0 then t.typelem else 0 end
)
select t.oid, t.typname::text, t.typtype::text, t.typcategory::text, t.typelem, t.typbasetype
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
    """Types by oid, arrays and domains with what they are made of. Unknown oids are left out."""
    with explained("Reading the catalog"):
        rows = {row[0]: row for row in connection.execute(_TYPES, {"oids": sorted(set(oids))}).fetchall()}
    return {oid: _built(oid, rows) for oid in rows}


def _built(oid: int, rows: Mapping[int, tuple[Any, ...]]) -> PgType:
    _, name, kind, category, element, parent = rows[oid]
    if kind == "d":
        return PgType(oid, name, TypeKind.DOMAIN, _built(parent, rows))
    if category == "A" and element:
        return PgType(oid, name, TypeKind.ARRAY, _built(element, rows))
    return PgType(oid, name, _TYPE_KINDS.get(kind, TypeKind.BASE))


_COLUMNS = """
select a.attname::text, a.atttypid, a.atttypmod from pg_catalog.pg_attribute a
 where a.attrelid = %s and a.attnum > 0 and not a.attisdropped and a.attgenerated = '' order by a.attnum
"""


def schema(connection: Connection, facts: TableFacts) -> TableSchema:
    """A table's schema as the stream will tell it: no generated columns, the identity's columns as key."""
    with explained("Reading the catalog"):
        rows = connection.execute(_COLUMNS, (facts.oid,)).fetchall()
    known = types(connection, (row[1] for row in rows))
    key = facts.identity_columns
    columns = tuple(Column(name, known[oid], modifier, name in key) for name, oid, modifier in rows)
    return TableSchema(facts.table, columns, oid=facts.oid, identity=facts.identity)


def relation(table: TableId) -> sql.Identifier:
    """The table in a composed statement."""
    return sql.Identifier(table.schema, table.name)

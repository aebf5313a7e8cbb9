"""The publication: an explicit list of tables, made before the slot.

A published table without a usable identity makes UPDATE and DELETE fail in the source's own application, and so does
a column list or row filter that the identity does not cover. So `ensure` refuses such a table before publishing it.
"""

from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql

from cdc.capture import catalog
from cdc.capture.catalog import TableFacts, relation
from cdc.capture.connect import explained
from cdc.config import SourceSettings, TableSettings
from cdc.errors import SourceRefused
from cdc.model import TableId

Connection = psycopg.Connection[tuple[Any, ...]]

OPERATIONS = ("insert", "update", "delete", "truncate")
FILTERS_FROM = 150_000


@dataclass(frozen=True, slots=True)
class Published:
    """One table of a publication. Empty `columns` means all; `where` is the filter as the server prints it."""

    table: TableId
    columns: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as the catalog has it."""

    name: str
    tables: tuple[Published, ...]
    operations: tuple[str, ...] = OPERATIONS
    via_root: bool = True
    all_tables: bool = False

    def fingerprint(self) -> str:
        """Equal for two publications that send the same: kept in the log to notice changes by hand."""
        return repr(replace(self, tables=tuple(sorted(self.tables, key=lambda entry: entry.table))))


_PUBLICATION = """
select puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
  from pg_catalog.pg_publication where pubname = %s
"""
_TABLES = """
select n.nspname::text, c.relname::text,
       (select array_agg(a.attname::text order by a.attnum) from pg_catalog.pg_attribute a
         where a.attrelid = c.oid and a.attnum = any({columns})),
       coalesce({filter}, '')
  from pg_catalog.pg_publication p
  join pg_catalog.pg_publication_rel pr on pr.prpubid = p.oid
  join pg_catalog.pg_class c on c.oid = pr.prrelid join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where p.pubname = %s order by 1, 2
"""
_SCHEMA_TABLES = """
select t.schemaname::text, t.tablename::text, null::text[], ''
  from pg_catalog.pg_publication_tables t where t.pubname = %s order by 1, 2
"""


def read(connection: Connection, name: str) -> Publication | None:
    """The publication, or None."""
    with explained(f"Reading publication {name}"):
        row = connection.execute(_PUBLICATION, (name,)).fetchone()
        if row is None:
            return None
        every, *publishes, via_root = row
        tables = connection.execute(_tables_query(connection, every), (name,)).fetchall()
    operations = tuple(operation for operation, sent in zip(OPERATIONS, publishes, strict=True) if sent)
    listed = tuple(Published(TableId(schema, table), tuple(cols or ()), cond) for schema, table, cols, cond in tables)
    return Publication(name, listed, operations, via_root, every)


def _tables_query(connection: Connection, every: bool) -> sql.SQL | sql.Composed:
    if every:
        return sql.SQL(_SCHEMA_TABLES)
    newer = connection.info.server_version >= FILTERS_FROM
    return sql.SQL(_TABLES).format(
        columns=sql.SQL("pr.prattrs" if newer else "null::int2[]"),
        filter=sql.SQL("pg_get_expr(pr.prqual, pr.prrelid)" if newer else "null::text"),
    )


def differences(found: Publication, source: SourceSettings) -> list[str]:
    """What a publication does not send as configured, in words; empty if it fits.

    A row filter is compared only for being there: the server prints conditions in its own way. The reader
    notices a change of the text by `fingerprint`.
    """
    have = {entry.table: entry for entry in found.tables}
    said = [f"{table.name} is not in it" for table in source.tables if table.name not in have]
    wanted = {table.name: table for table in source.tables}
    for name, entry in have.items():
        if name not in wanted:
            if not found.all_tables:
                said.append(f"{name} is in it but not configured")
            continue
        said += _entry_differences(entry, wanted[name])
    missing = [operation for operation in OPERATIONS if operation not in found.operations]
    if missing:
        said.append(f"it does not publish {', '.join(missing)}")
    if not found.via_root:
        said.append("publish_via_partition_root is off")
    return said


def _entry_differences(entry: Published, wanted: TableSettings) -> list[str]:
    said = []
    if set(entry.columns) != set(wanted.columns):
        said.append(f"{entry.table} publishes columns {_listed(entry.columns)} instead of {_listed(wanted.columns)}")
    if bool(entry.where) != bool(wanted.where):
        said.append(f"{entry.table} has {'a' if entry.where else 'no'} row filter, unlike configured")
    return said


def _listed(columns: tuple[str, ...]) -> str:
    return f"({', '.join(columns)})" if columns else "all"


def statement(source: SourceSettings) -> sql.Composed:
    """CREATE PUBLICATION for the configured tables."""
    head = sql.SQL("CREATE PUBLICATION {} FOR TABLE ").format(sql.Identifier(source.publication))
    tables = sql.SQL(", ").join(_clause(table) for table in source.tables)
    operations = sql.Literal(", ".join(OPERATIONS))
    return head + tables + sql.SQL(" WITH (publish = {}, publish_via_partition_root = true)").format(operations)


def _clause(table: TableSettings) -> sql.Composed:
    parts: list[sql.Composable] = [relation(table.name)]
    if table.columns:
        parts.append(sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Identifier, table.columns))))
    if table.where:
        # The condition is the pipeline owner's own SQL; the server parses it as one expression in parentheses.
        parts += [sql.SQL("WHERE ("), sql.SQL(table.where), sql.SQL(")")]
    return sql.SQL(" ").join(parts)


def ensure(connection: Connection, source: SourceSettings) -> Publication:
    """Make the publication if there is none; raise SourceRefused if the one there sends something else.

    Everything is decided in one transaction: a filter over columns outside the identity is rolled back before the
    application could stumble over it.
    """
    found = read(connection, source.publication)
    if found is None:
        refuse_unfit(catalog.tables(connection, (table.name for table in source.tables)), source)
        with explained(f"Creating publication {source.publication}"), connection.transaction():
            connection.execute(statement(source))
            refuse_filters(connection, source)
        found = read(connection, source.publication)
    if found is None:
        raise SourceRefused(f"Publication {source.publication} vanished while it was made.", "Start again.")
    if said := differences(found, source):
        raise SourceRefused(
            f"Publication {source.publication} differs from the pipeline: {'; '.join(said)}.",
            "Make the pipeline fit it, or drop it while nothing is captured and let Millrace create it.",
        )
    return found


def refuse_unfit(facts: list[TableFacts], source: SourceSettings) -> None:
    """Raise SourceRefused for the first table that cannot be published without harm."""
    found = {fact.table for fact in facts}
    for table in source.tables:
        if table.name not in found:
            raise SourceRefused(f"Table {table.name} does not exist.", "Create it or take it out of source.tables.")
    settings = {table.name: table for table in source.tables}
    for fact in facts:
        if problem := unfit(fact, settings[fact.leaf_of or fact.table]):
            raise SourceRefused(*problem)


def unfit(fact: TableFacts, table: TableSettings) -> tuple[str, str] | None:
    """Why publishing this table would harm its application or lose changes, with the remedy; None if it is fit."""
    if not fact.publishable:
        return f"{fact.table} is a {fact.kind_name}: Postgres cannot publish it.", "Take it out of source.tables."
    # The root of partitions has no rows of its own: its leaves decide.
    if not fact.identity_columns and fact.kind != "p":
        return (
            f"{fact.table} has no replica identity: once published, its UPDATE and DELETE would fail.",
            f"Run: {identity_statement(fact)}",
        )
    unknown = [name for name in table.columns if name not in fact.columns]
    if unknown:
        return f"{fact.table} has no column {unknown[0]}.", "Correct source.tables.columns."
    uncovered = [name for name in fact.identity_columns if table.columns and name not in table.columns]
    if uncovered:
        return (
            f"{fact.table}: the column list leaves out {', '.join(uncovered)} of its replica identity: once "
            "published, its UPDATE and DELETE would fail.",
            "Add these columns to source.tables.columns, and mask them if they must stay hidden.",
        )
    return None


def identity_statement(fact: TableFacts, full: bool = True) -> str:
    """What to run to give a table an identity; `full` says whether FULL would do."""
    name = relation(fact.table).as_string(None)
    if fact.primary_key:
        return f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT"
    if fact.candidate_index:
        index = sql.Identifier(fact.candidate_index).as_string(None)
        return f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX {index}"
    key = f"ALTER TABLE {name} ADD PRIMARY KEY (…)"
    return f"{key}, or else: ALTER TABLE {name} REPLICA IDENTITY FULL" if full else key


_FILTERED = """
select distinct d.refobjid, a.attname::text
  from pg_catalog.pg_publication p join pg_catalog.pg_publication_rel pr on pr.prpubid = p.oid
  join pg_catalog.pg_depend d on d.classid = 'pg_publication_rel'::regclass and d.objid = pr.oid
    and d.refclassid = 'pg_class'::regclass and d.refobjsubid > 0
  join pg_catalog.pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
 where p.pubname = %s and d.refobjid = pr.prrelid
"""


def refuse_filters(connection: Connection, source: SourceSettings) -> None:
    """Raise SourceRefused where a row filter looks at columns outside the table's identity."""
    filtered = {table.name: table for table in source.tables if table.where}
    if not filtered:
        return
    used: dict[int, set[str]] = {}
    for oid, column in connection.execute(_FILTERED, (source.publication,)).fetchall():
        used.setdefault(oid, set()).add(column)
    for fact in catalog.tables(connection, filtered):
        table = filtered.get(fact.table)
        # A column list depends on its columns too, so they cannot be told apart from the filter's here.
        outside = used.get(fact.oid, set()) - set(fact.identity_columns) - set(table.columns if table else ())
        if outside:
            raise SourceRefused(
                f"{fact.table}: its row filter uses {', '.join(sorted(outside))}, outside its replica identity: once "
                "published, its UPDATE and DELETE would fail.",
                f"Run: ALTER TABLE {relation(fact.table).as_string(None)} REPLICA IDENTITY FULL",
            )

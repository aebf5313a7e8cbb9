"""Whether a table may be published without harm: to its application, or to what we make of it.

A published table without a usable identity makes UPDATE and DELETE fail in the source's own application, and so does
a column list or row filter that the identity does not cover.
"""

from typing import Any

import psycopg
from psycopg import sql

from cdc.capture import catalog
from cdc.capture.catalog import TableFacts, relation
from cdc.config import SourceSettings, TableSettings
from cdc.errors import SourceRefused

Connection = psycopg.Connection[tuple[Any, ...]]


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
            f"Run: {statement(fact)}",
        )
    unknown = [name for name in table.columns if name not in fact.columns]
    if unknown:
        return f"{fact.table} has no column {unknown[0]}.", "Correct source.tables.columns."
    unknown = [name for name in table.mask if name not in fact.columns]
    if unknown:  # a misspelt rule would let through what it is meant to hide
        return f"{fact.table} has no column {unknown[0]} to mask.", "Correct source.tables.mask."
    uncovered = [name for name in fact.identity_columns if table.columns and name not in table.columns]
    if uncovered:
        return (
            f"{fact.table}: the column list leaves out {', '.join(uncovered)} of its replica identity: once "
            "published, its UPDATE and DELETE would fail.",
            "Add these columns to source.tables.columns, and mask them if they must stay hidden.",
        )
    return None


def statement(fact: TableFacts, full: bool = True) -> str:
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

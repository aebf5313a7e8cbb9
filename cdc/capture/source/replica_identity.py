"""Whether a table can be published without breaking its application or losing changes.

UPDATE and DELETE fail in the source's application on a published table without a usable replica identity, or with a
column list or row filter that the identity does not cover.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg import sql

from cdc.capture.replication.captured_tables import WaitReason
from cdc.capture.source import catalog, keys
from cdc.capture.source.catalog import TableFacts, relation
from cdc.capture.source.keys import UniqueIndex
from cdc.config.settings import SourceSettings, TableSettings
from cdc.errors import SourceRefused
from cdc.model import TableId

Connection = psycopg.Connection[tuple[Any, ...]]

_GENERATED_FROM = 180_000
"""From this version on Postgres can publish generated columns, and requires it for those of an identity."""


def refuse_unfit(facts: Sequence[TableFacts], source: SourceSettings) -> None:
    """Raise SourceRefused for the first table that cannot be published safely."""
    found = {fact.table for fact in facts}
    for table in source.tables:
        if table.name not in found:
            raise SourceRefused(f"Table {table.name} does not exist.", "Create it or remove it from source.tables.")
    for _, message, remedy in unfit_tables(facts, source):
        raise SourceRefused(message, remedy)


def unfit_tables(facts: Sequence[TableFacts], source: SourceSettings) -> Iterator[tuple[TableFacts, str, str]]:
    """Every table or leaf partition that cannot be published safely, with the reason and the remedy.

    A partition's changes have its root's name and its root's key flags, so both must have the same key.
    """
    settings = {table.name: table for table in source.tables}
    roots = {fact.table: fact for fact in facts if fact.leaf_of is None}
    for fact in facts:
        problem = unfit(fact, settings[fact.leaf_of or fact.table])
        root = roots.get(fact.leaf_of) if fact.leaf_of is not None else None
        if problem is None and root is not None and root.identity_columns:
            problem = _unlike_root(fact, root)
        if problem is not None:
            yield fact, *problem


def unfit(fact: TableFacts, table: TableSettings) -> tuple[str, str] | None:
    """Why publishing this table would break its application or lose changes, with the remedy; None: it is safe."""
    if not fact.publishable:
        return f"{fact.table} is a {fact.kind_name}: Postgres cannot publish it.", "Remove it from source.tables."
    unknown = [name for name in table.columns if name not in fact.columns]
    if unknown:
        return f"{fact.table} has no column {unknown[0]}.", "Correct source.tables.columns."
    unknown = [name for name in table.mask if name not in fact.columns]
    if unknown:  # a misspelt rule would not mask the column that it is meant for
        return f"{fact.table} has no column {unknown[0]} to mask.", "Correct source.tables.mask."
    return _without_identity(fact) or _unpublished(fact) or _uncovered(fact, table)


def _without_identity(fact: TableFacts) -> tuple[str, str] | None:
    if fact.identity_columns:
        return None
    deferrable = fact.identity == "d" and keys.primary_key(fact.indexes)
    why = " (its primary key is deferrable)" if deferrable else ""
    # The root of partitions has no rows of its own, but the stream flags its key as theirs.
    harm = "its UPDATE and DELETE would fail" if fact.kind != "p" else "rows of its partitions could not be identified"
    return (
        f"{fact.table} has no replica identity{why}: once published, {harm}.",
        f"Run: {statement(fact)}",
    )


def _unpublished(fact: TableFacts) -> tuple[str, str] | None:
    """Generated columns are not in the stream; from 18 on Postgres refuses the application's UPDATE and DELETE."""
    hidden = [name for name in fact.identity_columns if name in fact.generated]
    if hidden:
        return (
            f"{fact.table} is identified by the generated column {', '.join(hidden)}, which is not published: its rows "
            "could not be identified.",
            f"Run: {statement(fact)}",
        )
    if fact.identity == keys.FULL and fact.generated and fact.server >= _GENERATED_FROM:
        return (
            f"{fact.table} has identity FULL and the generated column {', '.join(fact.generated)}, which is not "
            "published: once published, its UPDATE and DELETE would fail.",
            f"Run: {statement(fact)}",
        )
    return None


def _uncovered(fact: TableFacts, table: TableSettings) -> tuple[str, str] | None:
    if not table.columns:
        return None
    if fact.identity == keys.FULL:
        return (
            f"{fact.table} has identity FULL, for which Postgres allows no column list: once published, its UPDATE "
            "and DELETE would fail.",
            "Drop columns with source.tables.mask (`drop`) instead of source.tables.columns"
            + (f", or run: {statement(fact)}" if _usable(fact) else "."),
        )
    uncovered = [name for name in fact.identity_columns if name not in table.columns]
    if uncovered:
        return (
            f"{fact.table}: the column list leaves out {', '.join(uncovered)} of its replica identity: once "
            "published, its UPDATE and DELETE would fail.",
            "Add these columns to source.tables.columns, and mask them if they must stay hidden.",
        )
    return None


def _unlike_root(fact: TableFacts, root: TableFacts) -> tuple[str, str] | None:
    """A leaf with identity FULL sends every key that its root may have."""
    if fact.identity == keys.FULL or (root.key and set(fact.identity_columns) == set(root.key)):
        return None
    name = relation(fact.table).as_string(None)
    fits = [index for index in _usable(fact) if set(index.columns) == set(root.key)]
    chosen = next((_chosen(index) for index in fits), "FULL")
    known = ", ".join(root.key) or "the whole row"
    return (
        f"{fact.table} is a partition of {root.table}, whose rows are identified by {known}, but it sends only "
        f"{', '.join(fact.identity_columns)} of an old row: rows could not be identified.",
        f"Run: ALTER TABLE {name} REPLICA IDENTITY {chosen}",
    )


def _usable(fact: TableFacts) -> list[UniqueIndex]:
    """The indexes that could serve as the identity, the primary key first."""
    return [
        index
        for index in fact.indexes
        if index.immediate and index.not_null and not set(index.columns) & set(fact.generated)
    ]


def _chosen(index: UniqueIndex) -> str:
    return "DEFAULT" if index.primary else f"USING INDEX {sql.Identifier(index.name).as_string(None)}"


def partition_of(table: TableId, root: TableId, source: SourceSettings) -> WaitReason:
    """Why a partition of a published table is not captured by itself."""
    captured = any(other.name == root for other in source.tables)
    message = f"{table} is a partition of {root}: Postgres sends its changes as changes of {root}"
    if captured:
        return WaitReason(
            f"{message}, which is captured.",
            f"Remove {table} from source.tables, or detach it: ALTER TABLE {relation(root).as_string(None)} DETACH "
            f"PARTITION {relation(table).as_string(None)}",
        )
    return WaitReason(
        f"{message}, which is not captured.", f"Replace {table} by {root} in source.tables, or detach it."
    )


def statement(fact: TableFacts, full: bool = True) -> str:
    """The statement that gives a table an identity; `full`: FULL is acceptable."""
    name = relation(fact.table).as_string(None)
    if usable := _usable(fact):
        return f"ALTER TABLE {name} REPLICA IDENTITY {_chosen(usable[0])}"
    whole = f"ALTER TABLE {name} REPLICA IDENTITY FULL"
    if keys.primary_key(fact.indexes):
        key = f"ALTER TABLE {name} ADD CONSTRAINT … UNIQUE (…) over other columns, then REPLICA IDENTITY USING INDEX …"
    else:
        key = f"ALTER TABLE {name} ADD PRIMARY KEY (…)"
    full = full and not (fact.generated and fact.server >= _GENERATED_FROM)
    return f"{key}, or else: {whole}" if full else key


_FILTERED = """
select distinct d.refobjid, a.attname::text
  from pg_catalog.pg_publication p join pg_catalog.pg_publication_rel pr on pr.prpubid = p.oid
  join pg_catalog.pg_depend d on d.classid = 'pg_publication_rel'::regclass and d.objid = pr.oid
    and d.refclassid = 'pg_class'::regclass and d.refobjsubid > 0
  join pg_catalog.pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
 where p.pubname = %s and d.refobjid = pr.prrelid
"""


def refuse_filters(connection: Connection, source: SourceSettings) -> None:
    """Raise SourceRefused if a row filter uses columns outside the table's identity."""
    filtered = {table.name: table for table in source.tables if table.where}
    if not filtered:
        return
    used: dict[int, set[str]] = {}
    for oid, column in connection.execute(_FILTERED, (source.publication,)).fetchall():
        used.setdefault(oid, set()).add(column)
    facts = catalog.tables(connection, filtered)
    oids = {fact.table: fact.oid for fact in facts}
    for fact in facts:
        root = fact.leaf_of or fact.table
        # pg_depend has the columns of the column list too, and does not distinguish them from the filter's.
        seen = used.get(oids[root], set()) - set(filtered[root].columns)
        if outside := seen - set(fact.identity_columns):
            raise SourceRefused(
                f"{fact.table}: its row filter uses {', '.join(sorted(outside))}, outside its replica identity: once "
                "published, its UPDATE and DELETE would fail.",
                f"Run: ALTER TABLE {relation(fact.table).as_string(None)} REPLICA IDENTITY FULL",
            )

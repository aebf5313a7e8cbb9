"""Why captured tables cannot be captured for now, according to the source's catalog.

The catalog is ahead of the stream by the capture lag, so the stream may show the same later.
"""

from collections.abc import Collection, Iterator

from cdc.capture.replication.captured_tables import WaitReason, renamed_reason
from cdc.capture.source import catalog, replica_identity
from cdc.capture.source.catalog import TableFacts
from cdc.capture.source.connect import Connection, explained
from cdc.capture.source.publication import Publication
from cdc.capture.source.schema_policy import refusal
from cdc.config.settings import SourceSettings, TableSettings
from cdc.errors import SourceError, SourceRefused
from cdc.model import TableId
from cdc.ports import Schemas
from snapshots.tables.rows import describe, masking_of

_NAMES = """
select c.oid::bigint, n.nspname::text, c.relname::text from pg_catalog.pg_class c
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace where c.oid = any(%s::oid[])
"""


def find(
    connection: Connection,
    source: SourceSettings,
    tables: Collection[TableId],
    *,
    anew: Collection[TableId],
    schemas: Schemas,
    published: Publication | None,
) -> dict[TableId, WaitReason]:
    """The reasons why some of these tables cannot be captured; `anew` are those that are to begin again.

    The schema policy is checked for those too; for the others the stream does it, at the right position.
    """
    chosen = [table for table in source.tables if table.name in tables]
    facts = catalog.tables(connection, (table.name for table in chosen))
    here = {fact.table for fact in facts}
    found = dict(_gone(connection, [table.name for table in chosen if table.name not in here], schemas))
    found |= _partitions(connection, source, here & set(tables), published)
    found |= {name: reason for name, reason in _unfit(facts, source, published) if name not in found}
    for table in chosen:
        if table.name in anew and table.name not in found:
            found |= _refused(connection, source, table, schemas)
    return found


def _gone(connection: Connection, tables: list[TableId], schemas: Schemas) -> Iterator[tuple[TableId, WaitReason]]:
    """Tables that do not exist under their name: renamed or dropped."""
    if not tables:
        return
    oids = {schema.table: schema.oid for schema in schemas.newest() if schema.oid}
    known = [oids[table] for table in tables if table in oids]
    with explained("Reading the catalog"):
        names = {oid: TableId(*name) for oid, *name in connection.execute(_NAMES, (known,)).fetchall()}
    for table in tables:
        name = names.get(oids.get(table, 0))
        yield table, _dropped(table) if name is None else renamed_reason(table, name)


def _dropped(table: TableId) -> WaitReason:
    return WaitReason(
        f"Table {table} was dropped: its rows stay in the stores.",
        "Create it again, and it begins again with its rows of then; or remove it from source.tables and run: millrace "
        "reload.",
    )


def _partitions(
    connection: Connection, source: SourceSettings, tables: Collection[TableId], published: Publication | None
) -> dict[TableId, WaitReason]:
    """Tables whose changes Postgres sends under the name of the partitioned table above them."""
    roots = {table.name for table in source.tables}
    if published is not None and published.all_tables:
        roots |= {entry.table for entry in published.tables}
    above = catalog.ancestors(connection, tables)
    published_roots = {table: [root for root in names if root in roots] for table, names in above.items()}
    return {
        table: replica_identity.partition_of(table, names[-1], source)
        for table, names in published_roots.items()
        if names
    }


def _unfit(
    facts: list[TableFacts], source: SourceSettings, published: Publication | None
) -> Iterator[tuple[TableId, WaitReason]]:
    sent = {entry.table for entry in published.tables} if published is not None else set()
    for fact, message, remedy in replica_identity.unfit_tables(facts, source):
        name = fact.leaf_of or fact.table
        harmed = name in sent and not fact.identity_columns and fact.kind != "p"
        harm = f" It is still in publication {source.publication}: they fail now." if harmed else ""
        yield name, WaitReason(message + harm, f"{remedy} It is then read again automatically.")


def _refused(
    connection: Connection, source: SourceSettings, table: TableSettings, schemas: Schemas
) -> dict[TableId, WaitReason]:
    refused: SourceError | None
    try:
        refused = refusal(schemas, describe(connection, table, masking_of(source)).layout.schema)
    except SourceRefused as error:  # dropped since its catalog entry was read
        refused = error
    return {} if refused is None else {table.name: WaitReason(refused.message, refused.remedy)}

"""The publication: an explicit list of tables, made before the slot.

A published table without a usable identity makes UPDATE and DELETE fail in the source's own application, and so does
a column list or row filter that the identity does not cover. So such a table is refused before it is published.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import psycopg
from psycopg import sql

from cdc.capture.source import catalog
from cdc.capture.source.catalog import relation
from cdc.capture.source.connect import explain, explained
from cdc.capture.source.replica_identity import refuse_filters, refuse_unfit
from cdc.config.settings import SourceSettings, TableSettings
from cdc.errors import LogCorrupt, SourceRefused
from cdc.model import TableId

Connection = psycopg.Connection[tuple[Any, ...]]

MARK = "publication"
"""The log's mark that holds the publication which the log was filled through."""
RESYNC = "Undo the change, or take a new snapshot with: millrace resync"

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
    """A publication as the catalog has it; `all_tables` also for whole schemas."""

    name: str
    tables: tuple[Published, ...]
    operations: tuple[str, ...] = OPERATIONS
    via_root: bool = True
    all_tables: bool = False
    generated: bool = False
    """Whether generated columns are published, which a snapshot would not have."""

    def mark(self) -> str:
        """As the log keeps it, to notice changes by hand. Equal for two publications that send the same."""
        ordered = replace(self, tables=tuple(sorted(self.tables, key=lambda entry: entry.table)))
        return json.dumps(asdict(ordered), separators=(",", ":"))

    def of(self, tables: Collection[TableId]) -> "Publication":
        """What it is for these tables: whatever else it holds is no concern of the pipeline."""
        return replace(self, tables=tuple(entry for entry in self.tables if entry.table in tables))

    @classmethod
    def of_mark(cls, text: str) -> Self:
        """Read it back. Raises LogCorrupt if the mark is not one."""
        try:
            facts = json.loads(text)
            tables = tuple(
                Published(TableId(**entry["table"]), tuple(entry["columns"]), entry["where"])
                for entry in facts.pop("tables")
            )
            return cls(tables=tables, **{**facts, "operations": tuple(facts["operations"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            raise LogCorrupt("The log's mark `publication` cannot be read.", RESYNC) from None


_PUBLICATION = """
select puballtables or {schemas}, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot,
       coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false)
  from pg_catalog.pg_publication p where pubname = %s
"""
_OF_SCHEMAS = "exists (select from pg_catalog.pg_publication_namespace n where n.pnpubid = p.oid)"
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
        newer = connection.info.server_version >= FILTERS_FROM
        schemas = sql.SQL(_OF_SCHEMAS if newer else "false")
        row = connection.execute(sql.SQL(_PUBLICATION).format(schemas=schemas), (name,)).fetchone()
        if row is None:
            return None
        every, *publishes, via_root, generated = row
        tables = connection.execute(_tables_query(connection, every), (name,)).fetchall()
    operations = tuple(operation for operation, sent in zip(OPERATIONS, publishes, strict=True) if sent)
    listed = tuple(Published(TableId(schema, table), tuple(cols or ()), cond) for schema, table, cols, cond in tables)
    return Publication(name, listed, operations, via_root, every, generated)


def _tables_query(connection: Connection, every: bool) -> sql.SQL | sql.Composed:
    if every:
        return sql.SQL(_SCHEMA_TABLES)
    newer = connection.info.server_version >= FILTERS_FROM
    return sql.SQL(_TABLES).format(
        columns=sql.SQL("pr.prattrs" if newer else "null::int2[]"),
        filter=sql.SQL("pg_get_expr(pr.prqual, pr.prrelid)" if newer else "null::text"),
    )


def differences(found: Publication, source: SourceSettings) -> list[str]:
    """What a publication does not send as configured, in words; empty if it fits. What it sends besides is dropped.

    A row filter is compared only for being there: the server prints conditions in its own way. The reader
    notices a change of the text by the mark.
    """
    have = {entry.table: entry for entry in found.tables}
    said = [f"{table.name} is not in it" for table in source.tables if table.name not in have]
    wanted = {table.name: table for table in source.tables}
    for name, entry in have.items():
        if name in wanted:
            said += _entry_differences(entry, wanted[name])
    missing = [operation for operation in OPERATIONS if operation not in found.operations]
    if missing:
        said.append(f"it does not publish {', '.join(missing)}")
    if not found.via_root:
        said.append("publish_via_partition_root is off")
    if found.generated:
        said.append("it publishes generated columns")
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


def _only(table: TableId) -> sql.Composed:
    """Without `ONLY`, tables that inherit from it would be published as well, and perhaps harmed."""
    return sql.SQL("ONLY {}").format(relation(table))


def _clause(table: TableSettings) -> sql.Composed:
    parts: list[sql.Composable] = [_only(table.name)]
    if table.columns:
        parts.append(sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Identifier, table.columns))))
    if table.where:
        # The condition is the pipeline owner's own SQL; the server parses it as one expression in parentheses.
        parts += [sql.SQL("WHERE ("), sql.SQL(table.where), sql.SQL(")")]
    return sql.SQL(" ").join(parts)


def _refuse_unfit(connection: Connection, source: SourceSettings) -> None:
    refuse_unfit(catalog.tables(connection, (table.name for table in source.tables)), source)


def drop(connection: Connection, name: str) -> None:
    """Give the publication up; no error if it is gone already."""
    with explained(f"Dropping publication {name}"):
        connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))


def ensure(connection: Connection, source: SourceSettings) -> Publication:
    """Make the publication if there is none; raise SourceRefused if the one there sends something else.

    Everything is decided in one transaction: a filter over columns outside the identity is rolled back before the
    application could stumble over it.
    """
    found = read(connection, source.publication)
    _refuse_unfit(connection, source)
    if found is None:
        with explained(f"Creating publication {source.publication}"), connection.transaction():
            connection.execute(statement(source))
            _refuse_unfit(connection, source)  # once more: from here on nobody can alter the tables
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


def follow(
    connection: Connection, source: SourceSettings, stored: Publication, waiting: Collection[TableId] = ()
) -> Publication:
    """The publication at a later start: tables that the pipeline gained or gave up are put in or taken out.

    Those of `waiting` are taken out too. What others have put in stays: it may be for somebody else.

    Raises SourceRefused where anything else differs from `stored`, what the log was filled through: a filter that
    somebody added has lost changes already.
    """
    found = read(connection, source.publication)
    if found is None:
        raise SourceRefused(f"Publication {source.publication} was dropped; what changed since is lost.", RESYNC)
    if said := altered(stored, found, {table.name for table in source.tables}):
        raise SourceRefused(f"Publication {source.publication} was changed: {'; '.join(said)}.", RESYNC)
    have, wanted = {entry.table for entry in found.tables}, {table.name for table in source.tables}
    surplus = (have - wanted) & {*waiting, *(entry.table for entry in stored.tables)}
    if not found.all_tables and (surplus or wanted - have):
        found = _adopt(connection, source, found, surplus)
    if said := differences(found, source):
        raise SourceRefused(
            f"Publication {source.publication} differs from the pipeline: {'; '.join(said)}.",
            "Undo the change of source.tables, or take a new snapshot with: millrace resync",
        )
    return found


def altered(stored: Publication, found: Publication, wanted: Collection[TableId]) -> list[str]:
    """What somebody changed by hand, in words. Tables that came, and tables nobody wants any more, are no loss."""
    now = {entry.table: entry for entry in found.tables}
    said = []
    for entry in stored.tables:
        if entry.table not in now:
            if entry.table in wanted:
                said.append(f"{entry.table} was taken out")
        elif now[entry.table] != entry:
            said.append(f"{entry.table} has another row filter or other columns")
    if found.operations != stored.operations:
        said.append(f"it publishes {', '.join(found.operations) or 'nothing'}")
    if found.via_root != stored.via_root:
        said.append("publish_via_partition_root changed")
    if found.generated != stored.generated:
        said.append("publish_generated_columns changed")
    return said


def _adopt(connection: Connection, source: SourceSettings, found: Publication, surplus: set[TableId]) -> Publication:
    """Put configured tables in, take others out, in one transaction."""
    have = {entry.table for entry in found.tables}
    added = [table for table in source.tables if table.name not in have]
    narrowed = source.model_copy(update={"tables": tuple(added)})
    _refuse_unfit(connection, narrowed)
    statements = _alterations(source, added, sorted(surplus))
    try:
        with connection.transaction():
            for change in statements:
                connection.execute(change)
            _refuse_unfit(connection, narrowed)
            refuse_filters(connection, source)
    except psycopg.errors.InsufficientPrivilege:
        if not added:
            return found  # what it sends besides is dropped
        said = "; ".join(change.as_string(None) for change in statements)
        raise SourceRefused(
            f"Role {source.user} may not change publication {source.publication}.", f"Run as its owner: {said}"
        ) from None
    except psycopg.Error as error:
        raise explain(error, f"Changing publication {source.publication}") from None
    return read(connection, source.publication) or found


def _alterations(source: SourceSettings, added: list[TableSettings], surplus: list[TableId]) -> list[sql.Composed]:
    alter = sql.SQL("ALTER PUBLICATION {} ").format(sql.Identifier(source.publication))
    found = []
    if added:
        found.append(alter + sql.SQL("ADD TABLE ") + sql.SQL(", ").join(map(_clause, added)))
    if surplus:
        found.append(alter + sql.SQL("DROP TABLE ") + sql.SQL(", ").join(map(_only, surplus)))
    return found

"""The publication: a list of tables, created before the slot.

UPDATE and DELETE fail in the source's application on a published table without a usable replica identity, or with a
column list or row filter that the identity does not cover. So such a table is refused before it is published.
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
"""The log's mark with the publication that the log was filled through."""
RESYNC = "Undo the change, or take a new snapshot with: millrace resync"

OPERATIONS = ("insert", "update", "delete", "truncate")
FILTERS_FROM = 150_000


@dataclass(frozen=True, slots=True)
class Published:
    """One table of a publication. Empty `columns`: all; `where` is the row filter as the server prints it."""

    table: TableId
    columns: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication in the catalog; `all_tables` is also set for TABLES IN SCHEMA."""

    name: str
    tables: tuple[Published, ...]
    operations: tuple[str, ...] = OPERATIONS
    via_root: bool = True
    all_tables: bool = False
    generated: bool = False
    """Whether generated columns are published, which a snapshot does not read."""

    def mark(self) -> str:
        """The text of the log's mark, to detect manual changes. Equal for publications that send the same."""
        ordered = replace(self, tables=tuple(sorted(self.tables, key=lambda entry: entry.table)))
        return json.dumps(asdict(ordered), separators=(",", ":"))

    def of(self, tables: Collection[TableId]) -> "Publication":
        """The publication with only these tables: the others do not concern the pipeline."""
        return replace(self, tables=tuple(entry for entry in self.tables if entry.table in tables))

    @classmethod
    def of_mark(cls, text: str) -> Self:
        """Parse a mark. Raises LogCorrupt if it is invalid."""
        try:
            facts = json.loads(text)
            tables = tuple(
                Published(TableId(**entry["table"]), tuple(entry["columns"]), entry["where"])
                for entry in facts.pop("tables")
            )
            return cls(tables=tables, **{**facts, "operations": tuple(facts["operations"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            raise LogCorrupt("The log's mark `publication` is invalid.", RESYNC) from None


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
    """How a publication differs from the configuration; empty: it does not. Additional tables do not count.

    Only the presence of a row filter is compared, because the server prints conditions in its own notation. A changed
    filter is detected with the mark.
    """
    have = {entry.table: entry for entry in found.tables}
    problems = [f"{table.name} is not in it" for table in source.tables if table.name not in have]
    wanted = {table.name: table for table in source.tables}
    for name, entry in have.items():
        if name in wanted:
            problems += _entry_differences(entry, wanted[name])
    missing = [operation for operation in OPERATIONS if operation not in found.operations]
    if missing:
        problems.append(f"it does not publish {', '.join(missing)}")
    if not found.via_root:
        problems.append("publish_via_partition_root is off")
    if found.generated:
        problems.append("it publishes generated columns")
    return problems


def _entry_differences(entry: Published, wanted: TableSettings) -> list[str]:
    found = []
    if set(entry.columns) != set(wanted.columns):
        found.append(f"{entry.table} publishes columns {_listed(entry.columns)} instead of {_listed(wanted.columns)}")
    if bool(entry.where) != bool(wanted.where):
        found.append(f"{entry.table} has {'a' if entry.where else 'no'} row filter, unlike configured")
    return found


def _listed(columns: tuple[str, ...]) -> str:
    return f"({', '.join(columns)})" if columns else "all"


def statement(source: SourceSettings) -> sql.Composed:
    """CREATE PUBLICATION for the configured tables."""
    head = sql.SQL("CREATE PUBLICATION {} FOR TABLE ").format(sql.Identifier(source.publication))
    tables = sql.SQL(", ").join(_clause(table) for table in source.tables)
    operations = sql.Literal(", ".join(OPERATIONS))
    return head + tables + sql.SQL(" WITH (publish = {}, publish_via_partition_root = true)").format(operations)


def _only(table: TableId) -> sql.Composed:
    """Without `ONLY`, tables that inherit from it would be published as well, and their UPDATE and DELETE could
    fail."""
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
    """Drop the publication; no error if it does not exist."""
    with explained(f"Dropping publication {name}"):
        connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))


def ensure(connection: Connection, source: SourceSettings) -> Publication:
    """Create the publication if there is none; raise SourceRefused if the existing one differs from the configuration.

    Creation and checks are one transaction: a filter over columns outside the identity is rolled back before it could
    make an UPDATE of the application fail.
    """
    found = read(connection, source.publication)
    _refuse_unfit(connection, source)
    if found is None:
        with explained(f"Creating publication {source.publication}"), connection.transaction():
            connection.execute(statement(source))
            _refuse_unfit(connection, source)  # once more: from here on the tables are locked against ALTER
            refuse_filters(connection, source)
        found = read(connection, source.publication)
    if found is None:
        raise SourceRefused(f"Publication {source.publication} was dropped while it was created.", "Start again.")
    if problems := differences(found, source):
        raise SourceRefused(
            f"Publication {source.publication} differs from the pipeline: {'; '.join(problems)}.",
            "Change the pipeline file, or drop the publication before the first start and let Millrace create it.",
        )
    return found


def update_tables(
    connection: Connection, source: SourceSettings, stored: Publication, waiting: Collection[TableId] = ()
) -> Publication:
    """Add the tables that the pipeline gained to the publication, and drop those that it lost; return the result.

    Tables of `waiting` are dropped too. Tables that others have added stay: other programs may use them.

    Raises SourceRefused if anything else differs from `stored`, the publication that the log was filled through: an
    added filter has lost changes already.
    """
    found = read(connection, source.publication)
    if found is None:
        raise SourceRefused(f"Publication {source.publication} was dropped; changes made since then are lost.", RESYNC)
    if changes := altered(stored, found, {table.name for table in source.tables}):
        raise SourceRefused(f"Publication {source.publication} was changed: {'; '.join(changes)}.", RESYNC)
    have, wanted = {entry.table for entry in found.tables}, {table.name for table in source.tables}
    surplus = (have - wanted) & {*waiting, *(entry.table for entry in stored.tables)}
    if not found.all_tables and (surplus or wanted - have):
        found = _alter_tables(connection, source, found, surplus)
    if problems := differences(found, source):
        raise SourceRefused(
            f"Publication {source.publication} differs from the pipeline: {'; '.join(problems)}.",
            "Undo the change of source.tables, or take a new snapshot with: millrace resync",
        )
    return found


def altered(stored: Publication, found: Publication, wanted: Collection[TableId]) -> list[str]:
    """Manual changes of the publication that may lose changes. Added tables, and tables not in `wanted`, do not
    count."""
    now = {entry.table: entry for entry in found.tables}
    changes = []
    for entry in stored.tables:
        if entry.table not in now:
            if entry.table in wanted:
                changes.append(f"{entry.table} was dropped from it")
        elif now[entry.table] != entry:
            changes.append(f"{entry.table} has another row filter or other columns")
    if found.operations != stored.operations:
        changes.append(f"it publishes {', '.join(found.operations) or 'nothing'}")
    if found.via_root != stored.via_root:
        changes.append("publish_via_partition_root changed")
    if found.generated != stored.generated:
        changes.append("publish_generated_columns changed")
    return changes


def _alter_tables(
    connection: Connection, source: SourceSettings, found: Publication, surplus: set[TableId]
) -> Publication:
    """Add missing configured tables and drop `surplus`, in one transaction."""
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
            return found  # capture drops the changes of surplus tables
        commands = "; ".join(change.as_string(None) for change in statements)
        raise SourceRefused(
            f"Role {source.user} may not change publication {source.publication}.", f"Run as its owner: {commands}"
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

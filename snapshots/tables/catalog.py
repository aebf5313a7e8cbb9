"""What a snapshot needs from the catalog about a table: its leaves, their size, and whether it may be read.

Every query runs in the transaction that will read the table, after `lock_for_read` (ACCESS SHARE, nothing stronger):
from then on no session can drop, rewrite or truncate it.
"""

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from cdc.capture.source.connect import explain, explained
from cdc.errors import SourceLost, SourceRefused
from cdc.model import TableId
from snapshots.initial.plan import Leaf

Connection = psycopg.Connection[tuple[Any, ...]]

_TID_RANGES_FROM = 140_000
"""Older servers scan the whole table for a range of ctids."""

_LEAVES = """
select n.nspname, c.relname, c.relfilenode, pg_relation_filenode(c.oid),
       coalesce(pg_relation_size(c.oid) / current_setting('block_size')::int, 0)::int8,
       has_table_privilege(c.oid, 'select'), c.reltuples::float8
from pg_partition_tree(%s::regclass) leaf
join pg_class c on c.oid = leaf.relid join pg_namespace n on n.oid = c.relnamespace
where leaf.isleaf and c.relkind = 'r'
union all
select n.nspname, c.relname, c.relfilenode, pg_relation_filenode(c.oid),
       coalesce(pg_relation_size(c.oid) / current_setting('block_size')::int, 0)::int8, true, c.reltuples::float8
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.oid = %s::regclass and c.relkind = 'r' and not c.relispartition
order by 1, 2
"""


def identifier(table: TableId) -> sql.Identifier:
    """The table's name for SQL, quoted."""
    return sql.Identifier(table.schema, table.name)


def regclass(table: TableId) -> str:
    """The table's name as the input of `regclass`, quoted."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in (table.schema, table.name))


def lock_for_read(connection: Connection, table: TableId, columns: Sequence[str]) -> None:
    """Lock a table (ACCESS SHARE) until the transaction ends, and check that these columns may be read in full.

    Raises SourceRefused with the statement to run: a grant is missing, or row security would hide rows.
    """
    chosen = sql.SQL(", ").join(map(sql.Identifier, columns)) if columns else sql.SQL("")
    query = sql.SQL("select {} from {} limit 0").format(chosen, identifier(table))
    try:
        connection.execute(query)
    except psycopg.errors.InsufficientPrivilege as error:
        raise _refused(
            table, connection.info.user, "row-level security" in (error.diag.message_primary or "")
        ) from None
    except psycopg.errors.UndefinedTable:
        raise SourceRefused(
            f"Table {table} does not exist in database {connection.info.dbname}.", "Check source.tables."
        ) from None
    except psycopg.Error as error:
        raise explain(error, f"Reading table {table}") from None


def files_of(connection: Connection, table: TableId) -> frozenset[int] | None:
    """The files of the table; None: one was created after the snapshot of this transaction.

    Call it after the table was read: then it cannot be rewritten before the transaction ends. Rows of a newer file may
    be invisible to the snapshot, so the table would look empty.
    """
    name = regclass(table)
    with explained("Reading the catalog"):
        found = [(known, actual) for _, _, known, actual, *_ in connection.execute(_LEAVES, [name, name])]
    if any(known not in (actual, 0) for known, actual in found):
        return None
    return frozenset(actual for _, actual in found)


def find_leaves(connection: Connection, table: TableId) -> tuple[tuple[Leaf, ...], int]:
    """The relations with the table's rows, and their estimated number of rows.

    The trap: in a snapshot that was exported before a table was rewritten, its new file looks empty. So the file that
    the snapshot sees in the catalog is compared with the actual one, and SourceLost is raised if they differ.
    """
    name = regclass(table)
    leaves, estimate = [], 0.0
    for schema, relation, known, actual, pages, allowed, rows in connection.execute(_LEAVES, [name, name]):
        leaf = TableId(schema, relation)
        if known not in (actual, 0):
            raise SourceLost(
                f"Table {leaf} was rewritten or truncated while its snapshot began.",
                "A new snapshot is started automatically.",
            )
        whole = not allowed or connection.info.server_version < _TID_RANGES_FROM
        leaves.append(Leaf(leaf, actual, pages, whole))
        estimate += max(rows, 0.0)
    if any(leaf.whole for leaf in leaves) and leaves[0].name != table:
        return (Leaf(table, 0, sum(leaf.pages for leaf in leaves), whole=True),), int(estimate)
    return tuple(leaves), int(estimate)


def _refused(table: TableId, user: str, row_security: bool) -> SourceRefused:
    if row_security:
        return SourceRefused(
            f"Row-level security hides rows of {table} from role {user}: a snapshot would silently miss them.",
            f'Run: ALTER ROLE "{user}" BYPASSRLS, or disable row security on the table.',
        )
    return SourceRefused(
        f"Role {user} may not read table {table}.", f'Run: GRANT SELECT ON {regclass(table)} TO "{user}"'
    )


_ESTIMATE = """
select coalesce(sum(greatest(c.reltuples, 0)), 0)::int8 from pg_class c
where c.relkind = 'r' and (c.oid = %s::regclass or c.oid in (select relid from pg_partition_tree(%s::regclass)))
"""


def estimated_rows(connection: Connection, table: TableId) -> int:
    """About how many rows a table has, by its statistics; 0: not known."""
    with explained("Reading the catalog"):
        row = connection.execute(_ESTIMATE, [regclass(table)] * 2).fetchone()
    return int(row[0]) if row else 0

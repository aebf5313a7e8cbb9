"""Foreign keys between tables, as the source's catalog has them."""

from collections.abc import Iterable

from cdc.capture.source.catalog import Connection
from cdc.capture.source.connect import explained
from cdc.model import ForeignKey, TableId

_QUERY = """
select n.nspname, c.relname, fn.nspname, fc.relname,
       array(select a.attname from unnest(con.conkey) with ordinality k(num, at)
             join pg_attribute a on a.attrelid = con.conrelid and a.attnum = k.num order by k.at),
       array(select a.attname from unnest(con.confkey) with ordinality k(num, at)
             join pg_attribute a on a.attrelid = con.confrelid and a.attnum = k.num order by k.at)
from pg_constraint con
join pg_class c on c.oid = con.conrelid join pg_namespace n on n.oid = c.relnamespace
join pg_class fc on fc.oid = con.confrelid join pg_namespace fn on fn.oid = fc.relnamespace
where con.contype = 'f' and n.nspname = any(%s)
order by con.conname
"""


def read(connection: Connection, tables: Iterable[TableId]) -> tuple[ForeignKey, ...]:
    """The foreign keys from one of these tables to another, ordered by their names."""
    wanted = set(tables)
    with explained("reading foreign keys"):
        rows = connection.execute(_QUERY, [sorted({table.schema for table in wanted})]).fetchall()
    found = [ForeignKey(TableId(row[0], row[1]), tuple(row[4]), TableId(row[2], row[3]), tuple(row[5])) for row in rows]
    return tuple(key for key in found if key.table in wanted and key.parent in wanted)

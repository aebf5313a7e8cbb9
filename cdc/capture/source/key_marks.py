"""The keys that rows are stored under, kept as a mark in the log.

A store cannot find a row under a key that was replaced (`drop constraint …, add primary key …`), and the stream has
only the new key; under identity FULL not even that. So the keys in the catalog are compared with the mark, at every
start and while capture runs, and a table whose key was replaced begins again.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from cdc.capture.source import catalog
from cdc.capture.source.catalog import TableFacts
from cdc.capture.source.connect import Connection
from cdc.config.settings import TableSettings
from cdc.model import TableId
from cdc.ports import LogWriter

MARK = "keys"
Keys = Mapping[str, Sequence[str]]
"""Names of the key columns by table name, sorted. Tables without a replica identity are left out."""


def current(connection: Connection, tables: Iterable[TableSettings]) -> Keys:
    """The keys in the catalog."""
    settings = {table.name: table for table in tables}
    facts = catalog.tables(connection, settings, leaves=False)
    return {
        str(fact.table): sorted(fact.key or _whole_row(fact, settings[fact.table]))
        for fact in facts
        if fact.identity_columns
    }


def _whole_row(fact: TableFacts, table: TableSettings) -> list[str]:
    kept = table.columns or fact.columns
    return [name for name in fact.columns if name in kept and table.mask.get(name) != "drop"]


def recorded(log: LogWriter) -> Keys:
    """The keys that the log's rows were written with, according to its mark."""
    found: Keys = json.loads(log.progress().marks.get(MARK, "{}"))
    return found


def recorded_or_in_schemas(log: LogWriter) -> Keys:
    """The same; for tables without the mark (older logs) the keys of their schemas. Reads the registry."""
    known = {str(schema.table): sorted(column.name for column in schema.key) for schema in log.schemas.newest()}
    return {**{table: key for table, key in known.items() if key}, **recorded(log)}


def replaced(now: Keys, before: Keys) -> list[TableId]:
    """The tables whose rows are stored under another key than their current one."""
    return [TableId.parse(table) for table in sorted(now) if list(before.get(table, now[table])) != list(now[table])]


def mark(now: Keys, before: Keys, tables: Iterable[TableSettings]) -> str:
    """The text of the mark; a table without an identity now keeps its former key."""
    names = sorted(str(table.name) for table in tables)
    known = {name: now.get(name, before.get(name)) for name in names if name in now or name in before}
    return json.dumps(known, ensure_ascii=False, separators=(",", ":"))

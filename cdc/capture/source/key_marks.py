"""The keys that the stores' rows lie under, kept as a mark in the log.

A store cannot find a row under a key that was replaced (`drop constraint …, add primary key …`), and the stream says
only what the key is from then on; under identity FULL not even that. So what the catalog says is compared with the
mark, at every start and while capture runs, and a table whose key was replaced begins again.
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
"""Table's name to the names of its key columns, sorted. A table without an identity is not there."""


def current(connection: Connection, tables: Iterable[TableSettings]) -> Keys:
    """The keys as the catalog has them."""
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


def marked(log: LogWriter) -> Keys:
    """The keys that the log's rows were written with, as its mark says."""
    found: Keys = json.loads(log.progress().marks.get(MARK, "{}"))
    return found


def noted(log: LogWriter) -> Keys:
    """The same also for tables that a log from before the mark knows only by their schemas. Reads the registry."""
    recorded = {str(schema.table): sorted(column.name for column in schema.key) for schema in log.schemas.newest()}
    return {**{table: key for table, key in recorded.items() if key}, **marked(log)}


def replaced(now: Keys, before: Keys) -> list[TableId]:
    """The tables whose rows lie under another key than they have now."""
    return [TableId.parse(table) for table in sorted(now) if list(before.get(table, now[table])) != list(now[table])]


def mark(now: Keys, before: Keys, tables: Iterable[TableSettings]) -> str:
    """As the log keeps it: of a table that has no identity now, what it had."""
    names = sorted(str(table.name) for table in tables)
    known = {name: now.get(name, before.get(name)) for name in names if name in now or name in before}
    return json.dumps(known, ensure_ascii=False, separators=(",", ":"))

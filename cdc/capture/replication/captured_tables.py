"""Which tables of the stream are captured, and which of them wait. Pure.

A publication may have more tables than the pipeline captures: changes of the others are dropped by relation id, before
any column is decoded. A captured table that cannot be captured for now waits: a mark in the log records that across
restarts, and its changes are dropped until it begins again with a truncate and a backfill (docs/adr/0015).
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

from cdc.model import TableId, TableSchema

PREFIX = "waiting:"
"""Prefix of the log's mark of each table that waits or has waited; the mark is empty once it is captured again."""


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why a table waits, and what to do."""

    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


def waiting_tables(marks: Mapping[str, str]) -> dict[TableId, WaitReason]:
    """The tables that wait according to the log's marks."""
    return {
        TableId.parse(name.removeprefix(PREFIX)): WaitReason(**json.loads(text))
        for name, text in marks.items()
        if text and name.startswith(PREFIX)
    }


def wait_mark(table: TableId, reason: WaitReason | None) -> dict[str, str]:
    """The mark that records in the log that a table waits; `reason` None: it waits no more."""
    return {f"{PREFIX}{table}": "" if reason is None else json.dumps(asdict(reason), ensure_ascii=False)}


class CapturedTables:
    """The tables captured over one connection; a table that begins to wait is removed until the next connection."""

    def __init__(self, tables: Collection[TableId], schemas: Iterable[TableSchema]) -> None:
        """`schemas` are the newest in the log: a renamed table is found by its oid."""
        self._tables = set(tables)
        self._known = {schema.table: schema for schema in schemas}
        self._names = {schema.oid: schema.table for schema in self._known.values() if schema.oid}

    def has(self, table: TableId) -> bool:
        """Whether a table of this name is captured."""
        return table in self._tables

    def renamed(self, oid: int, name: TableId) -> tuple[TableId, WaitReason] | None:
        """The captured table that has this new name, which is not in source.tables, and why it waits."""
        former = self._names.get(oid)
        if former is None or former == name or former not in self._tables:
            return None
        return former, renamed_reason(former, name)

    def lost_key(self, schema: TableSchema) -> WaitReason | None:
        """Why the table waits if it had a key until now and this schema has none."""
        known = self._known.get(schema.table)
        if schema.key or known is None or not known.key:
            return None
        return WaitReason(
            f"{schema.table} has no replica identity any more: its UPDATE and DELETE fail in the source while it is "
            "published.",
            "Give it a primary key or another replica identity; it is then read again automatically.",
        )

    def note(self, schema: TableSchema) -> None:
        """The stream has sent this schema of a table."""
        self._known[schema.table] = schema
        self._names[schema.oid] = schema.table

    def remove(self, table: TableId) -> None:
        """Drop its changes from here on."""
        self._tables.discard(table)


def renamed_reason(former: TableId, name: TableId) -> WaitReason:
    """Why a renamed table waits."""
    return WaitReason(
        f"{former} was renamed to {name}: its rows in the stores stay under the old name.",
        f"Replace {former} by {name} in source.tables and run: millrace reload. Or rename it back; it is then read "
        "again automatically.",
    )

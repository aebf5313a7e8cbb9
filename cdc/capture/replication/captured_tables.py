"""Which tables of the stream go into the log, and which of them wait. Pure.

A publication may hold more than the pipeline captures: changes of other tables are dropped by relation id, before any
column is decoded. A captured table that cannot be followed for now waits: a mark in the log says so, so that a restart
knows, and none of its changes passes until it begins again with a truncate and a backfill (docs/adr/0015).
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

from cdc.model import TableId, TableSchema

PREFIX = "waiting:"
"""Begins the log's mark of each table that waits or has waited; empty once it is captured again."""


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why a table waits, and what to do."""

    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


def waiting(marks: Mapping[str, str]) -> dict[TableId, WaitReason]:
    """The tables that the log knows to wait."""
    return {
        TableId.parse(name.removeprefix(PREFIX)): WaitReason(**json.loads(text))
        for name, text in marks.items()
        if text and name.startswith(PREFIX)
    }


def marked(table: TableId, reason: WaitReason | None) -> dict[str, str]:
    """The mark by which the log knows that a table waits; None: it does not wait any more."""
    return {f"{PREFIX}{table}": "" if reason is None else json.dumps(asdict(reason), ensure_ascii=False)}


class CapturedTables:
    """The tables of one connection whose changes are wanted; a table that waits leaves them for good."""

    def __init__(self, tables: Collection[TableId], schemas: Iterable[TableSchema]) -> None:
        """`schemas` are the newest that the log knows: a table under another name is found by its oid."""
        self._tables = set(tables)
        self._known = {schema.table: schema for schema in schemas}
        self._names = {schema.oid: schema.table for schema in self._known.values() if schema.oid}

    def takes(self, table: TableId) -> bool:
        """Whether changes under this name go into the log."""
        return table in self._tables

    def renamed(self, oid: int, name: TableId) -> tuple[TableId, WaitReason] | None:
        """The captured table that now goes by another name, which nobody asked for."""
        former = self._names.get(oid)
        if former is None or former == name or former not in self._tables:
            return None
        return former, renamed(former, name)

    def unidentified(self, schema: TableSchema) -> WaitReason | None:
        """Whether the table had a key until now, and this schema has none."""
        known = self._known.get(schema.table)
        if schema.key or known is None or not known.key:
            return None
        return WaitReason(
            f"{schema.table} has no replica identity any more: its UPDATE and DELETE fail in the source while it is "
            "published.",
            "Give it a primary key or another replica identity; it is then read again by itself.",
        )

    def know(self, schema: TableSchema) -> None:
        """The stream has shown it with this schema."""
        self._known[schema.table] = schema
        self._names[schema.oid] = schema.table

    def wait(self, table: TableId) -> None:
        """None of its changes is wanted from here on."""
        self._tables.discard(table)


def renamed(former: TableId, name: TableId) -> WaitReason:
    """Why a table waits whose name has changed."""
    return WaitReason(
        f"{former} is called {name} now: what it holds under its old name in the stores stays as it was.",
        f"Write {name} instead of {former} into source.tables and run: millrace reload. Or rename it back; it is then "
        "read again by itself.",
    )

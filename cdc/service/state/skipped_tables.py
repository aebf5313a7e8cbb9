"""Which tables a sink skips: a small file beside its checkpoint.

Promise: a table is in the file before its first change is dropped, and until a backfill has read the table again.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cdc import durable_files
from cdc.model import ZERO_LSN, Lsn, TableId, format_lsn, parse_lsn
from cdc.service.state.gaps import Gap


@dataclass(frozen=True, slots=True)
class Skipped:
    """`reached` is the LSN up to which the sink has the table. `since` is the log's head when it was skipped: no row of
    it in the store is newer. `refill` is the backfill that was requested on resume; empty while changes are dropped."""

    reached: Lsn
    since: Lsn
    refill: str = ""
    emptied: bool = False
    """Whether the old rows were removed from the store since the backfill was requested."""

    def dropped(self, end: Lsn) -> bool:
        """Whether the sink dropped the log entry that ends at `end`."""
        return end > self.reached and (not self.refill or end <= int(self.refill, 16))

    def refilled(self, table: TableId, capture: Mapping[str, object]) -> bool:
        """Whether, by capture's status, the whole table was read again."""
        missing = Gap(ZERO_LSN, Lsn(int(self.refill, 16) - 1), (str(table),))
        return not missing.remaining(capture).tables


class SkippedTables:
    """The file of one sink. For one process, from any of its threads."""

    def __init__(self, state: Path, sink: str) -> None:
        self._path = state / "checkpoints" / f"{sink}.skipped"
        self._lock = threading.Lock()
        self._tables = self._read()

    def all(self) -> Mapping[TableId, Skipped]:
        """Every table in the file."""
        return dict(self._tables)

    def dropping(self) -> frozenset[TableId]:
        """The tables whose changes are dropped now."""
        return frozenset(table for table, one in self._tables.items() if not one.refill)

    def add(self, table: TableId, reached: Lsn, since: Lsn) -> None:
        """Durable on return. A table whose changes are dropped already keeps its first LSNs."""
        with self._lock:
            if table not in self.dropping():
                self._write({**self._tables, table: Skipped(reached, since)})

    def refilling(self, table: TableId, backfill: str) -> None:
        """A backfill was requested; from now on changes are kept."""
        with self._lock:
            self._write({**self._tables, table: replace(self._tables[table], refill=backfill)})

    def emptied(self, table: TableId) -> None:
        """Its old rows were removed from the store."""
        with self._lock:
            self._write({**self._tables, table: replace(self._tables[table], emptied=True)})

    def remove(self, table: TableId) -> None:
        """The table is complete again."""
        with self._lock:
            self._write({name: one for name, one in self._tables.items() if name != table})

    def _read(self) -> Mapping[TableId, Skipped]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return {TableId.parse(table): _parsed(facts) for table, facts in found.items()}

    def _write(self, tables: Mapping[TableId, Skipped]) -> None:
        facts = {str(table): _facts(one) for table, one in tables.items()}
        durable_files.make_folder(self._path.parent)
        durable_files.replace(self._path, json.dumps(facts).encode())
        self._tables = tables


def _facts(one: Skipped) -> dict[str, str | bool]:
    lsns = {"reached": format_lsn(one.reached), "since": format_lsn(one.since)}
    return {**lsns, "refill": one.refill, "emptied": one.emptied}


def _parsed(facts: Mapping[str, str]) -> Skipped:
    return Skipped(parse_lsn(facts["reached"]), parse_lsn(facts["since"]), facts["refill"], bool(facts["emptied"]))

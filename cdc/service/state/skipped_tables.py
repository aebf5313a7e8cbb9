"""Which tables a sink has passed over without keeping their changes: a small file beside its checkpoint.

Promise: a table is in it before the first change is lost, and leaves it only when a backfill has read the table again.
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
    """`reached` is up to where the sink has the table, and `since` where the log ended: no row of it in the store is
    newer. `refill` is the backfill that was asked for later; empty while changes are passed over."""

    reached: Lsn
    since: Lsn
    refill: str = ""
    emptied: bool = False
    """Whether the rows of before were removed since the backfill was asked for."""

    def passed_over(self, end: Lsn) -> bool:
        """Whether the sink never got an entry of the log that ends there."""
        return end > self.reached and (not self.refill or end <= int(self.refill, 16))

    def refilled(self, table: TableId, capture: Mapping[str, object]) -> bool:
        """Whether capture says that the table was read again as a whole."""
        asked = Gap(ZERO_LSN, Lsn(int(self.refill, 16) - 1), (str(table),))
        return not asked.without(capture).tables


class SkippedTables:
    """The file of one sink. One process uses it, from any of its threads."""

    def __init__(self, state: Path, sink: str) -> None:
        self._path = state / "checkpoints" / f"{sink}.skipped"
        self._turn = threading.Lock()
        self._tables = self._read()

    def all(self) -> Mapping[TableId, Skipped]:
        """Every table of it."""
        return dict(self._tables)

    def passed_over(self) -> frozenset[TableId]:
        """Those whose changes are passed over now."""
        return frozenset(table for table, one in self._tables.items() if not one.refill)

    def add(self, table: TableId, reached: Lsn, since: Lsn) -> None:
        """Durable on return. One that is passed over already keeps its place."""
        with self._turn:
            if table not in self.passed_over():
                self._write({**self._tables, table: Skipped(reached, since)})

    def refilling(self, table: TableId, backfill: str) -> None:
        """A backfill was asked for; changes are applied again."""
        with self._turn:
            self._write({**self._tables, table: replace(self._tables[table], refill=backfill)})

    def emptied(self, table: TableId) -> None:
        """Its rows of before are gone from the store."""
        with self._turn:
            self._write({**self._tables, table: replace(self._tables[table], emptied=True)})

    def remove(self, table: TableId) -> None:
        """The table is whole again."""
        with self._turn:
            self._write({name: one for name, one in self._tables.items() if name != table})

    def _read(self) -> Mapping[TableId, Skipped]:
        try:
            said = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return {TableId.parse(table): _of_facts(one) for table, one in said.items()}

    def _write(self, tables: Mapping[TableId, Skipped]) -> None:
        said = {str(table): _facts(one) for table, one in tables.items()}
        durable_files.make_folder(self._path.parent)
        durable_files.replace(self._path, json.dumps(said).encode())
        self._tables = tables


def _facts(one: Skipped) -> dict[str, str | bool]:
    places = {"reached": format_lsn(one.reached), "since": format_lsn(one.since)}
    return {**places, "refill": one.refill, "emptied": one.emptied}


def _of_facts(said: Mapping[str, str]) -> Skipped:
    return Skipped(parse_lsn(said["reached"]), parse_lsn(said["since"]), said["refill"], bool(said["emptied"]))

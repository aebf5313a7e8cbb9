"""Filling a table of a sink again after changes of it were passed over: by a backfill beside the stream."""

from typing import Protocol

from cdc.capture.source import slot
from cdc.capture.source.connect import connect
from cdc.config.settings import Settings
from cdc.errors import SlotLost
from cdc.model import Lsn, TableId
from snapshots.backfill.requests import Request, ask
from snapshots.backfill.signing_key import control_key
from snapshots.tables.wal_messages import say


class Refill(Protocol):
    """Asks for a backfill."""

    def beats(self, version: Lsn) -> bool:
        """Whether rows that are read from now on have greater versions than that."""

    def ask(self, table: TableId) -> str:
        """Have the table read again as a whole; returns the backfill's id."""


class SourceRefill:
    """Through the source's WAL, like the command `backfill`. Raises MillraceError where that cannot be asked."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def beats(self, version: Lsn) -> bool:
        """The version of a row that is read is the slot's restart_lsn: an open transaction holds it back."""
        with connect(self._settings.source, "millrace refill") as connection:
            found = slot.find(connection, self._settings.source.slot)
        if found is None:
            raise SlotLost(f"Slot {self._settings.source.slot} is gone.", "See: millrace doctor")
        return found.restart_lsn > version

    def ask(self, table: TableId) -> str:
        """The id is the place of the request in the WAL."""
        message = ask(Request(table), control_key(self._settings.state))
        with connect(self._settings.source, "millrace refill") as connection:
            return f"{say(connection, message):X}"

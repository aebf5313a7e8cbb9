"""Requests a backfill that fills a sink's table again after the table was skipped or lost."""

from typing import Protocol

from cdc.capture.source import slot
from cdc.capture.source.connect import connect
from cdc.config.settings import Settings
from cdc.errors import SlotLost
from cdc.model import Lsn, TableId
from snapshots.backfill.requests import Request, backfill_message
from snapshots.backfill.signing_key import control_key
from snapshots.tables.wal_messages import write_message


class Refill(Protocol):
    """Requests a backfill."""

    def reads_newer_than(self, version: Lsn) -> bool:
        """Whether rows that are read from now on have versions greater than this one."""

    def request(self, table: TableId) -> str:
        """Have the whole table read again; returns the backfill's id."""


class SourceRefill:
    """Through the source's WAL, like the command `backfill`. Raises MillraceError if the source cannot be reached."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def reads_newer_than(self, version: Lsn) -> bool:
        """A row that is read gets the slot's restart_lsn as version, and an open transaction keeps that from moving."""
        with connect(self._settings.source, "millrace refill") as connection:
            found = slot.find(connection, self._settings.source.slot)
        if found is None:
            raise SlotLost(f"Slot {self._settings.source.slot} is gone.", "See: millrace doctor")
        return found.restart_lsn > version

    def request(self, table: TableId) -> str:
        """The id is the LSN of the request."""
        message = backfill_message(Request(table), control_key(self._settings.state))
        with connect(self._settings.source, "millrace refill") as connection:
            return f"{write_message(connection, message):X}"

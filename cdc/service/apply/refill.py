"""Requests what fills a sink's table again after the table was skipped or lost: a backfill of a captured table, the
whole content of a view from the view itself."""

from pathlib import Path
from typing import Protocol

from cdc.capture.source import slot
from cdc.capture.source.connect import connect
from cdc.config.settings import Settings
from cdc.errors import SlotLost
from cdc.model import Lsn, TableId
from cdc.ports import LogReader
from snapshots.backfill.requests import Request, backfill_message
from snapshots.backfill.signing_key import control_key
from snapshots.tables.wal_messages import write_message
from views.output_files import OutputFolder


class Refill(Protocol):
    """Requests the rows of a table again."""

    def reads_newer_than(self, version: Lsn) -> bool:
        """Whether rows that are read from now on have versions greater than this one."""

    def request(self, table: TableId) -> str:
        """Have the whole table read again; returns the backfill's id."""

    def emit_again(self, view: TableId) -> str:
        """Have a view hand over all its rows again; returns the log's head in the form of a backfill's id."""


class TableRefill:
    """Through the source's WAL, like the command `backfill`. Raises MillraceError if the source cannot be reached."""

    def __init__(self, settings: Settings, log: LogReader) -> None:
        self._settings = settings
        self._log = log

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

    def emit_again(self, view: TableId) -> str:
        """By a file in the view's folder. The rows have versions of their own: the table must be recreated first."""
        OutputFolder(self._settings.state, view.name).ask_to_emit_again()
        return f"{self._log.head()[1]:X}"


def emitted_again(state: Path, view: TableId) -> bool:
    """Whether everything that was asked of a view is in the log."""
    return not OutputFolder(state, view.name).asked_to_emit_again()

"""Fills a view from the tables as they are, where retention has removed the beginning of the log.

The tables are read by backfills beside the stream, whose rows come through the log like those of any backfill: no other
consumer waits, and sinks ignore what they have. The view is complete where all of them have ended.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cdc.capture.source.connect import connect
from cdc.config.settings import Settings
from cdc.durable_files import make_folder, replace
from cdc.errors import ViewError
from cdc.model import Lsn, TableId, format_lsn, parse_lsn
from snapshots.backfill.jobs import JobState, known
from snapshots.backfill.requests import Request, backfill_message
from snapshots.backfill.signing_key import control_key
from snapshots.tables.wal_messages import write_message

_FILE = "table-load.json"
Ask = Callable[[TableId], str]
"""Requests a backfill of a whole table; returns its id."""


def through_the_wal(settings: Settings) -> Ask:
    """Requests as the command `backfill` makes them. Raises SourceLost if the source cannot be reached."""

    def ask(table: TableId) -> str:
        message = backfill_message(Request(table), control_key(settings.state))
        with connect(settings.source, "millrace view") as connection:
            return f"{write_message(connection, message):X}"

    return ask


@dataclass(slots=True)
class TableLoad:
    """The backfills of one definition of a view, kept in its folder."""

    folder: Path
    view: str
    definition: str
    jobs: dict[str, str] = field(default_factory=dict)
    """The id of the backfill by table."""
    exact_from: Lsn | None = None
    """Where the view was complete; None: it is not yet. Events before it have no order in time."""

    @classmethod
    def read(cls, folder: Path, view: str, definition: str) -> "TableLoad | None":
        """The load of this definition; None if it needs none, or has not begun."""
        try:
            body = json.loads((folder / _FILE).read_bytes())
        except FileNotFoundError:
            return None
        if body["definition"] != definition:
            return None
        exact = parse_lsn(body["exact_from"]) if body["exact_from"] else None
        return cls(folder, view, definition, dict(body["jobs"]), exact)

    def begin(self, tables: Iterable[TableId], ask: Ask) -> None:
        """Request what has not been requested yet. A crash in between repeats at most one request."""
        for table in tables:
            if str(table) not in self.jobs:
                self.jobs[str(table)] = ask(table)
                self._write()

    def ended(self, marks: Mapping[str, str]) -> bool:
        """Whether every row of the tables is in the log. Raises ViewError if a backfill will not come to its end."""
        jobs = known(marks)
        for table, number in self.jobs.items():
            job = jobs.get(number)
            if job is not None and job.state in (JobState.FAILED, JobState.CANCELLED, JobState.LEFT):
                raise ViewError(
                    f"View {self.view} is filled from the tables as they are, and backfill {number} of {table} is"
                    f" {job.state}.",
                    f"Let it go on: millrace backfill --resume {number}",
                )
        return all(number in jobs and jobs[number].state is JobState.DONE for number in self.jobs.values())

    def complete(self, at: Lsn) -> None:
        """The view has read every row."""
        self.exact_from = at
        self._write()

    def _write(self) -> None:
        make_folder(self.folder)
        exact = "" if self.exact_from is None else format_lsn(self.exact_from)
        body = {"definition": self.definition, "jobs": self.jobs, "exact_from": exact}
        replace(self.folder / _FILE, json.dumps(body).encode())

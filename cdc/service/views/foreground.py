"""Runs one view from the beginning of the log in this process, apart from the pipeline: to see what it computes.

It has a state folder of its own, which is removed afterwards, and is no consumer of the log: nothing of the pipeline
changes, whether it runs or not.
"""

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from cdc.config.settings import Settings, ViewSettings
from cdc.durable_files import remove
from cdc.errors import MillraceError
from cdc.model import Lsn, parse_lsn
from cdc.ports import LogReader, Offset
from cdc.service.views.view_run import OpenView, ViewRun
from views.output_files import MARK_PREFIX, OutputFolder

_PAUSE_SECONDS = 0.02


class _UnregisteredLog:
    """A log that shows no marks of views and registers no consumer."""

    def __init__(self, log: LogReader) -> None:
        self._log: Any = log

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the log has
        return getattr(self._log, name)

    def marks(self) -> Mapping[str, str]:
        """Those of capture."""
        return {name: mark for name, mark in self._log.marks().items() if not name.startswith(MARK_PREFIX)}

    def commit(self, consumer: str, reached: Lsn, offset: Offset | None = None) -> None:
        """Registers nothing."""

    def forget(self, consumer: str) -> None:
        """Nothing is registered."""


def changes(
    settings: Settings, view: ViewSettings, log: LogReader, open_view: OpenView, *, until: Lsn | None, seconds: float
) -> Iterator[pa.Table]:
    """What the view hands over, in order, until it has caught up with the log, or reflects everything up to an LSN.

    Raises MillraceError if nothing comes for so many seconds and it has not.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-view-") as folder:
        own = settings.model_copy(update={"state": Path(folder)})
        output = OutputFolder(own.state, view.name)
        output.write_mark("")
        unregistered = cast("LogReader", _UnregisteredLog(log))
        with closing(open_view(own, view, unregistered, threading.Event())) as run:
            last = time.monotonic()
            while True:
                busy = run.step()
                for rows in _taken(output):
                    busy = True
                    yield rows
                if _is_complete(run, busy, until):
                    return
                last = time.monotonic() if busy else last
                if time.monotonic() - last > seconds:
                    raise _late(view, run, seconds)
                if not busy:
                    time.sleep(_PAUSE_SECONDS)


def _taken(output: OutputFolder) -> Iterator[pa.Table]:
    """What capture would append, taken out of the folder."""
    for path in output.pending():
        found = output.read(path)
        yield found.rows
        output.write_mark(found.after)
        remove(path)


def _is_complete(run: ViewRun, busy: bool, until: Lsn | None) -> bool:
    facts = run.facts()
    if facts.get("state") != "live":
        return False
    return not busy if until is None else parse_lsn(str(facts.get("lsn", "0/0"))) >= until


def _late(view: ViewSettings, run: ViewRun, seconds: float) -> MillraceError:
    facts = run.facts()
    return MillraceError(
        f"View {view.name} is {facts.get('state')} at {facts.get('lsn')}: nothing has come for {seconds:g} s.",
        "It needs every row of its tables in the log, and --until an LSN that the log reaches. See: millrace status",
    )

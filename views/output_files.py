"""The output of a view on its way to the log: Arrow files in a folder, written by the view and appended by capture.

The capture process is the only writer of the log. Each file carries the view's mark before and after its rows. Capture
appends the rows only while the log's mark `view.<name>` is the one before, and makes the mark after durable together
with them: so rows reach the log exactly once, whichever process ends at whichever moment.

    log's mark = before    append the rows with the mark after, then remove the file
    log's mark = after     the rows are in the log already: remove the file
    anything else          the view has begun again since: remove the file

Nothing here is synced: after a crash the view computes its output again from the log's mark.
"""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc

from cdc import failpoint
from cdc.durable_files import make_folder, remove, replace_unsynced, write_errors
from cdc.errors import LogCorrupt
from cdc.log.segments.schemas import decode, encode
from cdc.model import LOG_SCHEMA, TableSchema

MARK_PREFIX = "view."
"""The log's mark of a view is `view.<name>`: opaque text, which the view chooses and must never repeat."""
_SUFFIX = ".arrow"
_DIGITS = 12
_OPTIONS = ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class OutputFile:
    """Changes of one view, in the columns of LOG_SCHEMA and in order; `schema_id` is filled in by capture.

    `before` and `after` are the view's marks before and after these rows. They differ, and without rows only the mark
    moves. The rows' `version` and `commit_lsn` are the commit LSN that they reflect: at most the end of the log.
    """

    view: str
    before: str
    after: str
    schema: TableSchema
    rows: pa.Table


def view_folder(state: Path, view: str) -> Path:
    """The folder of one view under the state folder."""
    return state / "views" / view


class OutputFolder:
    """The output of one view. The view's process calls `put` and `clear`, capture the rest; a view is written by one
    process at a time."""

    def __init__(self, state: Path, view: str) -> None:
        self.view = view
        self._above = view_folder(state, view)
        self._folder = self._above / "output"
        self._number = 0

    def put(self, output: OutputFile) -> Path:
        """Hand over some rows; visible as a whole or not at all. Raises LogFull if the disk is full: nothing was put;
        ValueError for rows that the log could not take.

        The trap: a file may be discarded. Compare `mark` with the marks that were put, and begin again at `mark` if it
        is none of them.
        """
        make_folder(self._folder)
        self._number = max([self._number, *(int(path.stem) for path in self.pending()[-1:])]) + 1
        path = self._folder / f"{self._number:0{_DIGITS}}{_SUFFIX}"
        with write_errors(path):
            replace_unsynced(path, _encoded(output))
        failpoint.reached("views.after_put")
        return path

    def pending(self) -> Sequence[Path]:
        """The files that capture has not appended yet, oldest first."""
        try:
            paths = sorted(self._folder.iterdir())
        except FileNotFoundError:
            return ()
        return [path for path in paths if path.suffix == _SUFFIX and not path.name.startswith(".")]

    def read(self, path: Path) -> OutputFile:
        """One pending file. Raises LogCorrupt if it is not whole, as after a power cut; FileNotFoundError after
        `clear`."""
        content = path.read_bytes()
        try:
            with ipc.open_file(pa.py_buffer(content)) as reader:
                facts = dict(reader.schema.metadata or {})
                (schema,) = decode(facts[b"schema"])
                rows = reader.read_all().replace_schema_metadata(None).cast(LOG_SCHEMA)
                return OutputFile(self.view, facts[b"before"].decode(), facts[b"after"].decode(), schema, rows)
        except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise LogCorrupt(
                f"The output file {path.name} of view {self.view} is not readable.", "The view computes it again."
            ) from error

    def clear(self) -> None:
        """Discard what capture has not appended yet, as a view does that begins again. One that capture is appending at
        this moment may still reach the log: read `mark` afterwards."""
        with suppress(FileNotFoundError):
            for path in self._folder.iterdir():  # also what a killed process has left
                remove(path)

    @property
    def size(self) -> int:
        """Bytes that capture has not appended yet: a view should wait while they are many."""
        size = 0
        for path in self.pending():
            with suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    # -- what capture tells the view

    def mark(self) -> str | None:
        """The view's mark in the log, as capture last wrote it down; empty if the log has none, None before capture has
        looked. It may be behind the log after a crash of capture, until capture has started again."""
        try:
            return (self._above / "mark").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def write_mark(self, mark: str) -> None:
        """Write down the view's mark in the log. Only capture calls it."""
        if self.mark() != mark:
            make_folder(self._above)
            replace_unsynced(self._above / "mark", mark.encode())

    # -- what the view asks of capture

    def ask_for_ticks(self, seconds: float) -> None:
        """Ask for a tick in the log every so many seconds; 0: none."""
        make_folder(self._above)
        if seconds:
            replace_unsynced(self._above / "tick_seconds", repr(seconds).encode())
        else:
            remove(self._above / "tick_seconds")

    def tick_seconds(self) -> float:
        """How often this view asks for a tick; 0: it does not."""
        try:
            return float((self._above / "tick_seconds").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return 0.0

    # -- what others ask of the view

    def ask_to_emit_again(self) -> None:
        """Ask the view to hand over its whole content again: a store has lost it, or is new."""
        make_folder(self._above)
        replace_unsynced(self._above / "emit-again", secrets.token_hex(8).encode())

    def asked_to_emit_again(self) -> str:
        """The present request; empty: none. Remember it before the first row is handed over, for `emitted_again`."""
        try:
            return (self._above / "emit-again").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def emitted_again(self, request: str) -> None:
        """The whole content is in the log: call it once `mark` is the mark after it or a later one (several files may
        become one entry). A newer request stays: it began later."""
        if self.asked_to_emit_again() == request:
            remove(self._above / "emit-again")


def _encoded(output: OutputFile) -> bytes:
    _require_valid(output)
    facts = {b"before": output.before.encode(), b"after": output.after.encode(), b"schema": encode((output.schema,))}
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, LOG_SCHEMA.with_metadata(facts), options=_OPTIONS) as writer:
        writer.write_table(output.rows.replace_schema_metadata(None))
    return sink.getvalue().to_pybytes()


def _require_valid(output: OutputFile) -> None:
    """Refuse what the log would refuse later, in a process that could not tell the view."""
    rows, table = output.rows, str(output.schema.table)
    if not rows.schema.equals(LOG_SCHEMA):
        raise ValueError(f"the rows of view {output.view} do not have LOG_SCHEMA")
    if missing := [field.name for field in LOG_SCHEMA if not field.nullable and rows[field.name].null_count]:
        raise ValueError(f"the rows of view {output.view} have nulls in {', '.join(missing)}")
    if rows.num_rows and rows["table"].unique().to_pylist() != [table]:
        raise ValueError(f"the rows of view {output.view} are not all of table {table}")
    if output.before == output.after:
        raise ValueError(f"the mark of view {output.view} does not move")

"""Appends the output of views to the log, and the ticks that they ask for, in a thread beside the capture loop.

Protocol: `views.output_files`. The capture process is the only writer of the log, and this thread the only one that
changes the marks of views, so comparing a mark and appending after it cannot interleave with another change of it.
A view's entry has no LSN of its own: it ends where the log ends.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pyarrow as pa

from cdc import failpoint
from cdc.capture.replication.append_counts import AppendCounts
from cdc.clock import SystemClock
from cdc.config.settings import VIEW_SCHEMA
from cdc.durable_files import remove
from cdc.errors import LogCorrupt, LogFull, MillraceError
from cdc.model import LOG_SCHEMA, TICKS_TABLE, ZERO_LSN, Entry, Lsn, Op, TableId, TableSchema
from cdc.ports import Clock, LogWriter, Schemas
from views import dropped
from views.output_files import MARK_PREFIX, OutputFile, OutputFolder

TICK_MARK = "ticks"
_DROP_MARK = "dropped.view."
"""With the time of the last drop: an entry whose marks the log has already would be ignored as a repeat."""
_FIRST_SECONDS, _LONGEST_SECONDS = 0.005, 0.05
"""Between two looks at the folders: short while files come, so that a view adds little to the lag of its rows; an idle
pipeline looks twenty times a second, which takes 0.4 % of a CPU for five views."""
_LIST_SECONDS = 1.0
"""Between two looks for new folders of views, and for the ticks that they ask for."""
_RETRY_SECONDS = 1.0
_MERGE_BYTES = 16 << 20
_log = logging.getLogger(__name__)
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class _Taken:
    """Files that follow one another, to be appended as one entry."""

    paths: Sequence[Path]
    outputs: Sequence[OutputFile]

    @property
    def after(self) -> str:
        return self.outputs[-1].after


class ViewOutput:
    """Appends in a thread while the block runs. While the log is full it waits, and the files stay. Any other error of
    the log sets `stop`, for a restart: whether the last append is durable is then read from the log again.

    `schemas` is the log's own registry: the schema policy of the source does not concern views.
    """

    def __init__(
        self, log: LogWriter, schemas: Schemas, state: Path, stop: threading.Event, clock: Clock = _CLOCK
    ) -> None:
        self._log = log
        self._schemas = schemas
        self._state = state
        self._clock = clock
        self._folders: dict[str, OutputFolder] = {}
        self._list_due = 0.0
        self._tick_seconds, self._tick_due = 0.0, 0.0
        self.counts = AppendCounts()
        """The rows of views that were appended."""
        self.trouble = ""
        """Why nothing can be appended at the moment; empty: appending works."""
        self.failure: MillraceError | None = None
        """The error that ended the thread."""
        self._stop_capture = stop
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="view-output", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def turn(self) -> bool:
        """Append what is pending, and a tick if one is due; False if there was nothing. Raises MillraceError."""
        now = self._clock.monotonic()
        if now >= self._list_due:
            self._list_due = now + _LIST_SECONDS
            self._list_folders()
            for name in self._folders:
                if dropped.is_due(self._state, name):
                    self._truncate(name)
        appended = [self._append_pending(folder) for folder in self._folders.values()]
        return self._tick(now) or any(appended)

    def _run(self) -> None:
        pause = _FIRST_SECONDS
        while not self._stop.wait(pause):
            try:
                busy = self.turn()
            except LogFull as error:
                self._waits(str(error))
                pause = _RETRY_SECONDS
            except MillraceError as error:
                self.failure = error
                self._stop_capture.set()
                return
            except Exception as error:
                _log.exception("Appending the output of views failed unexpectedly and is retried")
                self.trouble, pause = f"unexpected {type(error).__name__}", _RETRY_SECONDS
            else:
                self._waits("")
                pause = self._busy_seconds if busy else min(_LONGEST_SECONDS, 1.5 * pause)

    @property
    def _busy_seconds(self) -> float:
        """Half of the log's interval: the capture loop takes the other half. Files that come meanwhile are merged."""
        return max(_FIRST_SECONDS, self._log.append_interval / 2)

    def _waits(self, trouble: str) -> None:
        if trouble and not self.trouble:
            _log.warning("The output of views waits: %s", trouble)
        elif self.trouble and not trouble:
            _log.info("The output of views is appended again.")
        self.trouble = trouble

    def _list_folders(self) -> None:
        """Find the views' folders, and tell each the mark that the log has: a crash may have come between."""
        try:
            names = sorted(path.name for path in (self._state / "views").iterdir() if path.is_dir())
        except FileNotFoundError:
            names = []
        marks = self._log.progress().marks
        self._folders = {name: self._folders.get(name) or OutputFolder(self._state, name) for name in names}
        with suppress(OSError):  # a full disk: at the next look
            for name, folder in self._folders.items():
                folder.write_mark(marks.get(MARK_PREFIX + name, ""))
        asked = [seconds for folder in self._folders.values() if (seconds := folder.tick_seconds())]
        self._tick_seconds = min(asked, default=0.0)

    # -- output

    def _append_pending(self, folder: OutputFolder) -> bool:
        paths = folder.pending()
        if not paths:
            return False
        taken = self._chain(folder, paths)
        if taken is None:
            return True
        recorded = [self._schemas.record(output.schema) for output in taken.outputs]
        numbered = zip(taken.outputs, recorded, strict=True)
        rows = pa.concat_tables([_with_schema_id(output.rows, schema.id) for output, schema in numbered])
        failpoint.reached("views.before_append")
        self._log.append(Entry(rows, ZERO_LSN, {MARK_PREFIX + folder.view: taken.after}))
        failpoint.reached("views.after_append")
        self.counts.add(rows, rows.nbytes)
        with suppress(OSError):  # a full disk: at the next look for folders
            folder.write_mark(taken.after)
        for path in taken.paths:
            remove(path)
        failpoint.reached("views.after_remove")
        return True

    def _chain(self, folder: OutputFolder, paths: Sequence[Path]) -> _Taken | None:
        """The first files that continue at the log's mark, each at the one before. Removes repeats and stale files."""
        mark = self._log.progress().marks.get(MARK_PREFIX + folder.view, "")
        chosen: list[tuple[Path, OutputFile]] = []
        size = 0
        for path, output in _read(folder, paths):
            if output.before == mark and output.after != mark:
                chosen.append((path, output))
                mark, size = output.after, size + output.rows.nbytes
                if size >= _MERGE_BYTES:
                    break
            elif chosen:
                break
            else:
                _discard(folder, path, repeat=output.after == mark)
        return _Taken(*zip(*chosen, strict=True)) if chosen else None

    def _truncate(self, view: str) -> None:
        """Append a truncate of a dropped view's table and forget its mark: what it still hands over is stale then."""
        table, end = TableId(VIEW_SCHEMA, view), self._log.progress().end
        schema = next((one for one in self._schemas.newest() if one.table == table), None)
        rows = LOG_SCHEMA.empty_table() if schema is None else _truncation(schema, end, self._clock.now())
        self._log.append(Entry(rows, ZERO_LSN, {MARK_PREFIX + view: "", _DROP_MARK + view: str(self._clock.now())}))
        failpoint.reached("views.after_truncate")
        dropped.done(self._state, view)
        _log.warning("view %s was dropped: its rows are removed from the stores", view)

    # -- ticks

    def _tick(self, now: float) -> bool:
        """Append a tick if one is due. Ticks that were missed are not made up for."""
        if not self._tick_seconds or now < self._tick_due:
            return False
        self._tick_due = now + self._tick_seconds
        at = self._clock.now().astimezone(UTC)
        progress = self._log.progress()
        text = at.isoformat(timespec="microseconds")
        if text <= progress.marks.get(TICK_MARK, ""):  # the clock was set back
            return False
        self._log.append(Entry(tick(progress.end, at), ZERO_LSN, {TICK_MARK: text}))
        return True


def tick(end: Lsn, at: datetime) -> pa.Table:
    """The row of a tick: op `m`, which every sink and every fold ignores."""
    text = at.isoformat(timespec="microseconds")
    row = {"table": TICKS_TABLE, "op": Op.MESSAGE.value, "key": '{"id":1}', "after": f'{{"id":1,"at":"{text}"}}'}
    return _one_row({**row, "version": end, "schema_id": 0}, end, at)


def _truncation(schema: TableSchema, end: Lsn, at: datetime) -> pa.Table:
    """Greater than every version of the view's rows, which are below the log's end, also after the fold has taken one
    off. Rows of a view that is resumed later need the log's end of then as version: older ones would be ignored."""
    row = {"table": str(schema.table), "op": Op.TRUNCATE.value, "version": end + 1, "schema_id": schema.id}
    return _one_row(row, end, at)


def _one_row(row: dict[str, object], end: Lsn, at: datetime) -> pa.Table:
    more = {"commit_lsn": end, "ordinal": 0, "xid": 0, "commit_ts": at}
    return pa.Table.from_pylist([{**row, **more}], LOG_SCHEMA)


def _read(folder: OutputFolder, paths: Sequence[Path]) -> Iterator[tuple[Path, OutputFile]]:
    """The files with their content; one that is gone meanwhile ends them, an unreadable one is removed."""
    for path in paths:
        try:
            yield path, folder.read(path)
        except FileNotFoundError:  # the view begins again
            return
        except LogCorrupt as error:
            _log.warning("%s", error)
            remove(path)


def _discard(folder: OutputFolder, path: Path, *, repeat: bool) -> None:
    if repeat:
        _log.debug("view %s: output file %s is in the log already", folder.view, path.name)
    else:
        _log.warning("view %s: output file %s is discarded: the view began again since", folder.view, path.name)
    remove(path)


def _with_schema_id(rows: pa.Table, number: int) -> pa.Table:
    column = pa.array([number] * rows.num_rows, pa.int32())
    return rows.set_column(rows.schema.get_field_index("schema_id"), LOG_SCHEMA.field("schema_id"), column)

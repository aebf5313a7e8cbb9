"""Copies the rows of one table from the log, batch by batch: the simplest view that keeps every promise of ViewRun.

Its state is the log itself: after a crash it reads on from the log's mark.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.settings import Settings, ViewSettings
from cdc.errors import LogLost, MillraceError
from cdc.model import LOG_SCHEMA, ZERO_LSN, Lsn, TableId, TableSchema, format_lsn
from cdc.ports import LogReader, Offset
from views.output_files import OutputFile, OutputFolder


class _Copy:
    def __init__(self, settings: Settings, view: ViewSettings, log: LogReader, stop: threading.Event) -> None:
        facts = view.model_dump()
        self._source, self._fail = TableId.parse(str(facts["source"])), facts["fail"]
        self._view, self._log, self._stop = view, log, stop
        self._folder = OutputFolder(settings.state, view.name)
        self._definition = hashlib.sha256(str(self._source).encode()).hexdigest()[:8]
        self._folder.clear()
        self._mark = self._appended = ""
        self._after, self._reached, self._rows = self._log.start(), ZERO_LSN, 0
        self._put: list[tuple[str, Offset, Lsn]] = []
        """Marks that are not in the log yet, with the place where each ends."""
        self._emission = ("", "")
        self._begun = False

    def step(self) -> bool:
        if self._fail:
            kind = LogLost if self._fail == "transient" else MillraceError
            raise kind("The copy fails on purpose.", "Take `fail` out.")
        if not self._begun:
            return self._begin()
        self._commit()
        if (request := self._folder.asked_to_emit_again()) and request != self._emission[0]:
            self._emit_again(request)
            return True
        found = False
        for piece in self._log.read(self._after):
            rows = piece.rows.filter(pc.field("table") == str(self._source))
            self._after, self._reached, found = piece.offset, piece.end, True
            if rows.num_rows:
                self._hand_over(rows)
            if self._stop.is_set():
                break
        return found

    def _begin(self) -> bool:
        """Wait until capture has told the mark, then go on after it."""
        mark = self._folder.mark()
        if mark is None:
            return False
        self._mark = self._appended = mark
        self._begun = True
        known = json.loads(mark) if mark else {}
        if known.get("definition") == self._definition:
            self._after = Offset(known["offset"])
        return True

    def _commit(self) -> None:
        """Follow the log's mark. One that is not ours: capture was restarted, or the output discarded."""
        mark = self._folder.mark() or ""
        self._forget_appended(mark)
        request, after = self._emission
        if request and after not in {one[0] for one in self._put}:
            self._folder.emitted_again(request)
            self._emission = ("", "")

    def _forget_appended(self, mark: str) -> None:
        for number, (after, offset, reached) in enumerate(self._put):
            if after == mark:
                self._log.commit(f"view.{self._view.name}", reached, offset)
                self._put, self._appended = self._put[number + 1 :], mark
                return
        if mark != self._appended:
            raise LogLost("The log has another mark.", "The view begins again at it.")

    def _emit_again(self, request: str) -> None:
        rows = LOG_SCHEMA.empty_table()
        for piece in self._log.read(self._log.start(), self._after):
            rows = pa.concat_tables([rows, piece.rows.filter(pc.field("table") == str(self._source))])
        self._hand_over(rows)
        self._emission = (request, self._mark)

    def _hand_over(self, rows: pa.Table) -> None:
        """The rows as those of the view, from the present mark to the next."""
        schema = next(one for one in self._log.schemas.newest() if one.table == self._source)
        at = LOG_SCHEMA.get_field_index("table")
        copied = rows.set_column(at, LOG_SCHEMA.field("table"), pa.array([str(self._view.table)] * rows.num_rows))
        facts = {"lsn": format_lsn(self._reached), "offset": self._after, "definition": self._definition}
        number = json.loads(self._mark).get("number", 0) + 1 if self._mark else 1
        after = json.dumps({**facts, "number": number})
        self._folder.put(OutputFile(self._view.name, self._mark, after, _schema(schema, self._view.table), copied))
        self._put.append((after, self._after, self._reached))
        self._mark, self._rows = after, self._rows + rows.num_rows

    def facts(self) -> Mapping[str, object]:
        return {
            "state": "live" if self._begun else "waiting",
            "lsn": format_lsn(self._reached),
            "rows": self._rows,
            "state_bytes": 0,
        }

    def close(self) -> None:
        """Nothing is open."""


def _schema(source: TableSchema, table: TableId) -> TableSchema:
    return replace(source, table=table, id=0, oid=0, identity="d")


def open_view(settings: Settings, view: ViewSettings, log: LogReader, stop: threading.Event) -> _Copy:
    return _Copy(settings, view, log, stop)

"""One view at work: reads the log, moves its steps on batch by batch, and hands the changes over to capture.

The log's mark of the view says up to which offset its output is in the log. Everything else can be computed again:
after a crash the view continues from its last checkpoint, and what it computes up to the mark is not handed over again.
A checkpoint is made only when the log has all output, so it is never ahead of the mark.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc import failpoint
from cdc.config.settings import Settings, ViewSettings
from cdc.durable_files import remove
from cdc.errors import ViewError
from cdc.model import ZERO_LSN, Lsn, format_lsn, parse_lsn
from cdc.ports import LogReader, Offset
from cdc.service.views.catalog import all_rows_read, catalog_of
from cdc.service.views.table_load import TableLoad, through_the_wal
from cdc.service.views.view_run import ViewRun, consumer_of
from snapshots.initial.snapshot import EXACT_MARK
from views import registry
from views.dataflow.output import Moment, changes
from views.emission import emptied, former_content, replacement, whole_content
from views.output_files import MARK_PREFIX, OutputFile, OutputFolder, view_folder
from views.state import checkpoint

_BATCH_ROWS = 20_000
_BATCH_BYTES = 16 << 20
_WAITING_BYTES = 64 << 20
"""Output that capture has not appended yet, above which the view waits."""
_CHECKPOINT_SECONDS = 10.0
_LATE_SECONDS = 30.0
"""Under load some output is always on its way: after this long without a checkpoint the view waits until it has
arrived."""
_COMMIT_SECONDS = 0.5
_LOADED_SECONDS = 0.5
_NOTE_SECONDS = 0.25
"""Between two looks at the size of the state: at each step they were most of the CPU of an idle view."""
_NOT_YET = Lsn(2**63 - 1)


@dataclass(frozen=True, slots=True)
class Mark:
    """The log's mark of a view: the offset up to which its output is in the log."""

    offset: Offset
    lsn: Lsn
    definition: str
    emission: int
    """Grows whenever the whole content is handed over, so that no mark is repeated."""
    part: int = 0
    """Of a whole content that is handed over in parts: the number of this part; 0: it is complete."""

    def text(self) -> str:
        """As stored in the log."""
        facts = {"offset": self.offset, "lsn": format_lsn(self.lsn), "definition": self.definition}
        return json.dumps({**facts, "emission": self.emission, "part": self.part}, separators=(",", ":"))

    @classmethod
    def of_text(cls, text: str) -> Self | None:
        """Parse a mark; None for an empty one."""
        if not text:
            return None
        body = json.loads(text)
        return cls(Offset(body["offset"]), parse_lsn(body["lsn"]), body["definition"], body["emission"], body["part"])


class ViewEngine:
    """Runs one view; see `ViewRun`."""

    def __init__(self, settings: Settings, view: ViewSettings, log: LogReader, stop: threading.Event) -> None:
        self._settings, self._view, self._log, self._stop = settings, view, log, stop
        self._plan = registry.plan_of(view, catalog_of(settings, view, log))
        self._folder = OutputFolder(settings.state, view.name)
        self._states = view_folder(settings.state, view.name) / "state"
        self._consumer = consumer_of(view.name)
        self._checked: set[tuple[str, int]] = set()
        self._facts: dict[str, object] = {"state": "loading"}
        self._begin()

    # -- beginning

    def _begin(self) -> None:
        """Continue from the last checkpoint, or from the log's start."""
        self._folder.clear()
        self._put = self._log.marks().get(MARK_PREFIX + self._view.name, "")
        """The mark after everything that was handed over."""
        mark = Mark.of_text(self._put)
        self._former = mark.definition if mark else ""
        self._emission = mark.emission if mark else 0
        self._graph = self._plan.graph()
        self._tables = pa.array([name for each in self._graph.inputs for name in each.tables])
        known = self._restore()
        self._exact = self._exact_from()
        same = mark is not None and mark.definition == self._plan.definition
        self._live = mark is not None and same and not mark.part and not self._filling
        self._until = mark.offset if mark and self._live and known != self._put else None
        """The log has the output up to here already; None: the output is new."""
        self._loaded: Offset | None = None
        """Where every row of the tables has been read, once that is known."""
        self._parts: Iterator[tuple[pa.Table, Mark]] = iter(())
        self._answering = ""
        """The request for the whole content that is being answered."""
        self._saved = self._looked = time.monotonic()
        self._dirty = self._computing = False
        """Whether there is something to save; whether the state has a part of a batch, as after an error."""
        self._noted = -_NOTE_SECONDS
        self._commit()
        self._note()

    def _restore(self) -> str | None:
        """Load the checkpoint; returns the mark at its time."""
        facts = checkpoint.facts_of(self._state)
        self._position, self._reached = self._log.start() if facts is None else Offset(facts["offset"]), ZERO_LSN
        self._load = self._table_load(anew=facts is None and bool(self._log.removed()))
        if facts is not None:
            checkpoint.load(self._state, self._graph.tables)
            self._reached = Lsn(int(facts["lsn"]))
        self._kept = self._position
        """The offset from which a restart reads."""
        return None if facts is None else facts["mark"]

    def _table_load(self, *, anew: bool) -> TableLoad | None:
        """How the view is filled from the tables, if retention has removed the beginning of the log; requests the
        backfills that it lacks."""
        folder = self._states.parent
        load = TableLoad.read(folder, self._view.name, self._plan.definition)
        if anew and (load is None or load.exact_from is not None):
            load = TableLoad(folder, self._view.name, self._plan.definition)
        if load is not None and load.exact_from is None:
            load.begin(self._plan.columns, through_the_wal(self._settings))
        return load

    @property
    def _filling(self) -> bool:
        return self._load is not None and self._load.exact_from is None

    @property
    def _state(self) -> Path:
        return self._states / self._plan.definition

    # -- steps

    def step(self) -> bool:
        """Process one batch of the log, or hand over a part of the whole content."""
        if self._is_discarded():
            self._begin()
            return True
        if self._folder.size > _WAITING_BYTES:
            return False
        if (part := next(self._parts, None)) is not None:
            self._hand_over(*part)
            return True
        if self._dirty and time.monotonic() - self._saved > _LATE_SECONDS:
            return self._save()
        busy = self._advance()
        busy = self._begin_whole_content() or busy
        if self._dirty and time.monotonic() - self._saved > _CHECKPOINT_SECONDS:
            busy = self._save() or busy
        self._note()
        return busy

    def _advance(self) -> bool:
        """Read the next batch and compute what follows from it."""
        limit = self._until or self._loaded
        found, count, size = [], 0, 0
        for piece in self._log.read(self._position, limit):
            found.append(piece)
            count, size = count + piece.rows.num_rows, size + piece.rows.nbytes
            if count >= _BATCH_ROWS or size >= _BATCH_BYTES:
                break
        if found:
            rows = [each.rows.filter(pc.is_in(each.rows.column("table"), value_set=self._tables)) for each in found]
            self._compute(pa.concat_tables(rows).combine_chunks(), found[-1].offset, found[-1].end)
        if self._until == self._position:
            self._until = None
        return bool(found)

    def _compute(self, rows: pa.Table, position: Offset, reached: Lsn) -> None:
        self._check_schemas(rows)
        self._computing = True
        if self._exact is None:
            self._exact = self._exact_from()
        self._graph.begin(_NOT_YET if self._exact is None else self._exact, reached)
        delta = self._graph.step(rows)
        failpoint.reached("views.after_step")
        self._position, self._reached, self._dirty, self._computing = position, reached, True, False
        if delta.num_rows and self._live and self._until is None:
            moment = Moment(pc.max(rows.column("commit_lsn")).as_py(), pc.max(rows.column("commit_ts")).as_py())
            mark = Mark(position, reached, self._plan.definition, self._emission)
            self._hand_over(changes(self._view.table, delta, moment), mark)

    def _check_schemas(self, rows: pa.Table) -> None:
        """Raise ViewError if a table has lost a column that the view needs: its values would silently be null."""
        for pair in rows.select(["table", "schema_id"]).group_by(["table", "schema_id"]).aggregate([]).to_pylist():
            table, number = pair["table"], pair["schema_id"]
            if (table, number) not in self._checked:
                self._check_schema(table, number)
                self._checked.add((table, number))

    def _check_schema(self, table: str, number: int) -> None:
        for known, names in self._plan.columns.items():
            if str(known) != table:
                continue
            schema = self._log.schemas.get(known, number)
            if missing := sorted(set(names) - {column.name for column in schema.columns}):
                raise ViewError(
                    f"View {self._view.name} needs column {missing[0]} of {table}, which was removed or renamed.",
                    "Change the view's definition in the pipeline file.",
                )

    def _exact_from(self) -> Lsn | None:
        """The LSN at which the initial snapshot, or the reading of the tables, ends; None before it has."""
        if self._load is not None:
            return self._load.exact_from
        text = self._log.marks().get(EXACT_MARK, "")
        return parse_lsn(text) if text else None

    # -- output

    def _hand_over(self, rows: pa.Table, mark: Mark) -> None:
        text = mark.text()
        self._folder.put(OutputFile(self._view.name, self._put, text, self._plan.schema, rows))
        self._put = text

    def _is_discarded(self) -> bool:
        """Whether capture has discarded what was handed over, because the log had another mark."""
        return not self._folder.pending() and self._folder.mark() not in (None, self._put)

    def _begin_whole_content(self) -> bool:
        """Begin to hand over the whole content: the first time, after a change of the definition, or on request."""
        if self._until is not None:
            return False
        if not self._live:
            if not self._all_rows_read():
                return False
            self._live, self._loaded = True, None
            self._parts = self._first_content()
            if self._load is not None and self._filling:
                self._load.complete(self._reached)
                self._exact = self._reached
            return True
        return self._answer_request()

    def _all_rows_read(self) -> bool:
        now = time.monotonic()
        if self._loaded is None and now - self._looked >= _LOADED_SECONDS:
            self._looked = now
            marks = self._log.marks()
            if self._load.ended(marks) if self._load else all_rows_read(marks, self._plan.columns):
                self._loaded = self._log.head()[0]
        return self._loaded == self._position

    def _first_content(self) -> Iterator[tuple[pa.Table, Mark]]:
        whole, same = whole_content(self._graph.output, self._now()), self._former == self._plan.definition
        if self._put and self._filling and (same or checkpoint.facts_of(self._states / self._former) is None):
            # What the log had of the view is not known any more: the stores begin with nothing.
            return self._in_parts(chain([emptied(self._view.table, self._now())], whole))
        if not self._former or same:
            return self._in_parts(whole)
        former = former_content(self._states, self._former, self._view.table, self._log)
        return self._in_parts(iter([replacement(self._graph.output, former, self._now())]))

    def _now(self) -> Moment:
        """The position as a moment: above every commit that was read, below every later one."""
        return Moment(self._reached - 1, datetime.now(UTC))

    def _in_parts(self, pieces: Iterator[pa.Table]) -> Iterator[tuple[pa.Table, Mark]]:
        """The pieces, each with its mark; the state must not change before the last one."""
        self._emission += 1
        held = next(pieces)
        for number, piece in enumerate(pieces, 1):
            yield held, Mark(self._position, self._reached, self._plan.definition, self._emission, number)
            held = piece
        yield held, Mark(self._position, self._reached, self._plan.definition, self._emission)

    def _answer_request(self) -> bool:
        """Hand over the whole content if somebody has asked for it, once for each request."""
        if self._answering:
            if self._folder.mark() != self._put:
                return False
            self._folder.emitted_again(self._answering)
            self._answering = ""
            return True
        self._answering = self._folder.asked_to_emit_again()
        if not self._answering:
            return False
        self._parts = self._in_parts(whole_content(self._graph.output, self._now()))
        return True

    # -- checkpoints

    def _save(self) -> bool:
        """Make a checkpoint, unless some output is still on its way to the log."""
        if (
            not self._dirty
            or self._computing
            or self._until is not None
            or (self._live and self._folder.mark() != self._put)
        ):
            return False
        self._graph.care.forget()
        facts = {"offset": self._position, "lsn": str(self._reached), "mark": self._put if self._live else ""}
        checkpoint.save(self._state, self._graph.tables, facts)
        failpoint.reached("views.after_checkpoint")
        self._kept = self._position
        self._commit()
        self._saved, self._dirty = time.monotonic(), False
        if self._live:
            self._remove_former_states()
        return True

    def _remove_former_states(self) -> None:
        """The log has the content of this definition now."""
        for path in self._states.iterdir():
            if path != self._state:
                remove(path)

    # -- status

    def _note(self) -> None:
        """Renew the facts for the status, and now and then the LSN that the log has as reached."""
        since, reached = self._committed
        if self._reached > reached and time.monotonic() - since > _COMMIT_SECONDS and self._in_log() > reached:
            self._commit()
        if time.monotonic() - self._noted < _NOTE_SECONDS:
            return
        self._noted = time.monotonic()
        tables = self._graph.tables
        self._facts = {
            "state": "live" if self._live and self._until is None else "loading",
            "lsn": format_lsn(self._reached),
            "rows": self._graph.output.count,
            "state_bytes": sum(table.bytes for table in tables.values()),
            "definition": self._plan.definition,
            **self._graph.care.facts(),
        }

    def _commit(self) -> None:
        self._committed = time.monotonic(), self._in_log()
        self._log.commit(self._consumer, self._committed[1], self._kept)

    def _in_log(self) -> Lsn:
        """The LSN that the view's rows in the log reflect; 0 until all of them are there. Rows that were handed over
        count only once capture has appended them: who waits for them would otherwise look too early."""
        text = self._folder.mark() if self._live else None
        mark = Mark.of_text(text or "")
        if mark is None or mark.part or mark.definition != self._plan.definition:
            return ZERO_LSN
        return max(self._reached, mark.lsn) if text == self._put else mark.lsn

    def facts(self) -> Mapping[str, object]:
        """For the status."""
        return self._facts

    def close(self) -> None:
        """Make a checkpoint if that is possible at once: the next start then reads less of the log."""
        self._save()


def open_view(settings: Settings, view: ViewSettings, log: LogReader, stop: threading.Event) -> ViewRun:
    """Open a view of any kind."""
    return ViewEngine(settings, view, log, stop)

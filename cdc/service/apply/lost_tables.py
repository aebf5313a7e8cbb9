"""Detects tables that a store has lost, holds them back, and refills them.

The last fingerprint of each table (`sinks.fingerprints`) is kept with the sink's position at that time. A table with
another fingerprint is lost: it is held back from that position on, like a paused one, and the sink's position does not
count until the table is as it was, or was recreated and every row was read again.

An older copy of a table that knows its own LSN lacks only the changes since: these are applied again from the log.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cdc.config.settings import Settings, SinkSettings
from cdc.errors import MillraceError
from cdc.model import ZERO_LSN, Lsn, TableId, TableSchema, parse_lsn
from cdc.ports import LogReader
from cdc.service.apply.held_back_tables import TableRequests
from cdc.service.apply.refill import Refill, emitted_again
from cdc.service.state import status
from cdc.service.state.sink_positions import by_name, consumer_name
from cdc.service.state.store_files import LogPosition, Loss, StoredMark, StoreFiles
from sinks.apply.applier import Applier
from sinks.fingerprints import Difference, Fingerprinted, Positioned

LOOK_SECONDS = 5.0
"""Between two comparisons: each takes a request or two, not measurable beside the batches."""
_ENDED = {"failed": "failed", "cancelled": "was cancelled"}
_log = logging.getLogger(__name__)


class LostTables:
    """One sink's fingerprints and losses: a `FingerprintRecorder`. The applier calls it during batches, the worker
    calls `repair` from another thread: each changes a loss only if the other has not changed it meanwhile."""

    def __init__(self, settings: Settings, sink: SinkSettings, log: LogReader, refill: Refill) -> None:
        self._settings = settings
        self._sink = sink
        self._log = log
        self._refill = refill
        self._files = StoreFiles(settings.state, sink.name)
        self._marks, self._losses = self._files.marks(), self._files.losses()
        self._reached = ZERO_LSN
        self._changing = threading.Lock()
        self._due = 0.0
        self._requests = TableRequests()
        for table in self.lost:  # a process that ended between two steps may not have held it back yet
            self._hold_back(table, self._losses[table].position, replace_newer=False)

    def follow(self, requests: TableRequests) -> None:
        """Use these requests. Losses of skipped tables, and of tables that the sink no longer has, are forgotten."""
        self._requests = requests
        for table, loss in list(self._losses.items()):
            if not self._concerns(table):
                self._change(table, loss, None)

    def facts(self) -> dict[str, dict[str, str]]:
        """By table, for the status."""
        return {str(table): loss.facts() for table, loss in sorted(self._losses.items())}

    def with_lost(self, requests: TableRequests) -> TableRequests:
        """The requests, with lost tables among the paused ones."""
        return replace(requests, paused=requests.paused | self.lost)

    # -- called by the applier: sinks.fingerprints.FingerprintRecorder

    @property
    def lost(self) -> frozenset[TableId]:
        """Tables that must not be written."""
        return frozenset(table for table, loss in self._losses.items() if loss.blocks_writes)

    def connected(self) -> None:
        """The next comparison is due at once."""
        self._due = 0.0

    def compare_marks(self, sink: object) -> frozenset[TableId]:
        """Compare the fingerprints if it is time. Returns the tables that are lost since."""
        if time.monotonic() < self._due or not isinstance(sink, Fingerprinted):
            return frozenset()
        known = {table: stored.mark for table, stored in self._marks.items() if self._concerns(table)}
        position = self._position()
        self._reached = max(self._reached, position.reached)
        found = sink.compare_marks(known, position.reached) if known else {}
        self._due = time.monotonic() + LOOK_SECONDS
        differing = {table: mark for table, mark in found.items() if isinstance(mark, Difference)}
        good = {table: StoredMark(mark, position) for table, mark in found.items() if not isinstance(mark, Difference)}
        newly_lost = frozenset(table for table, difference in differing.items() if self._lose(table, difference))
        if newly_lost and isinstance(sink, Positioned):
            # the table of an older copy is held back: the rest is at the sink's position
            sink.record_position(position.reached)
        self._end_losses(good)
        self._keep({**self._marks, **good})
        return newly_lost

    def prepared(self, sink: object, schemas: Sequence[TableSchema]) -> None:
        """Leave a mark in each table that has none yet. The trap: all marks are one file, which is written once."""
        new = [schema for schema in schemas if schema.table not in self._marks]
        if isinstance(sink, Fingerprinted) and new:
            position = self._position()
            self._keep({**self._marks, **{one.table: StoredMark(sink.mark_table(one), position) for one in new}})

    def recreated(self, sink: object, schema: TableSchema) -> None:
        """Leave a mark in a recreated table."""
        if isinstance(sink, Fingerprinted):
            self._keep({**self._marks, schema.table: StoredMark(sink.mark_table(schema), self._position())})
            self.record_position(sink, ZERO_LSN)

    def record_position(self, sink: object, reached: Lsn) -> None:
        """Have the store record its position, if it can."""
        if isinstance(sink, Positioned):
            self._reached = max(self._reached, reached)  # a restarted query repeats batches
            sink.record_position(self._reached)

    # -- called by the worker's own thread

    def repair(self, applier: Applier) -> None:
        """Take the next step for every table that is to be refilled. Raises transient errors."""
        requested = self._files.requested_refills()
        for table, loss in list(self._losses.items()):
            wanted = table in requested or (self._sink.on_loss == "refill" and loss.state == "lost")
            now = self._change(table, loss, replace(loss, state="renewing")) if wanted and loss.refill else loss
            if now is not None and now.state == "renewing":
                now = self._recreate(applier, table, now)
            if now is not None and now.state == "asking":
                now = self._start_refill(table, now)
            if now is not None and now.state in ("refilling", "rewinding"):
                self._check_refill(applier, table, now)
        if requested:
            self._files.remove_refill_request()

    def _recreate(self, applier: Applier, table: TableId, loss: Loss) -> Loss | None:
        schema = next((schema for schema in self._log.schemas.newest() if schema.table == table), None)
        try:
            if schema is not None:
                applier.recreate(schema)
        except MillraceError as error:
            if error.transient:
                raise
            return self._change(table, loss, replace(loss, message=f"cannot be recreated: {error.message}"))
        _log.warning("sink %s: %s was recreated, empty; its rows are read again", self._sink.name, table)
        return self._change(table, loss, replace(loss, state="asking"))

    def _start_refill(self, table: TableId, loss: Loss) -> Loss | None:
        """Request a backfill, or the whole content of a view. With a Debezium log, Millrace does not read the source:
        the log is read again instead."""
        if self._settings.log.kind == "debezium":
            offset, head = self._log.head()
            self._hold_back(table, LogPosition(ZERO_LSN, self._log.start()), replace_newer=True)
            message = "lost its rows; what the topics still have of them is applied again"
            until = LogPosition(head, offset)
            return self._change(table, loss, replace(loss, state="rewinding", message=message, until=until))
        if table in self._requests.views:
            identity = self._refill.emit_again(table)
            message, remedy = "lost its rows; the view hands them over again", "Wait; see: millrace view list"
            refilling = replace(loss, state="refilling", backfill=identity, until=None, message=message, remedy=remedy)
            return self._change(table, loss, refilling)
        identity = self._refill.request(table)
        message = f"lost its rows; backfill {identity} reads them again"
        refilling = replace(loss, state="refilling", backfill=identity, until=None, message=message)
        return self._change(table, loss, replace(refilling, remedy="Wait; its progress: millrace backfill"))

    def _check_refill(self, applier: Applier, table: TableId, loss: Loss) -> None:
        """End the loss once everything missing is in the log and the sink has applied it."""
        now = self._check_backfill(table, loss) if loss.until is None else loss
        if now is None or now.until is None or table in applier.held_back:
            return
        here = self._position()
        if here.reached > now.until.reached or here.offset == now.until.offset:
            self._change(table, now, None)
            _log.warning("sink %s: %s has all its rows again", self._sink.name, table)

    def _check_backfill(self, table: TableId, loss: Loss) -> Loss | None:
        """The loss, updated if the backfill has ended, or the view has handed over its rows."""
        if table in self._requests.views:
            offset, head = self._log.head()
            done = emitted_again(self._settings.state, table)
            return self._change(table, loss, replace(loss, until=LogPosition(head, offset))) if done else loss
        facts = status.read(self._settings.state, "capture")
        exact, jobs = facts.get("history_exact_from"), facts.get("backfills")
        states = {job["id"]: job["state"] for job in jobs} if isinstance(jobs, list) else {}
        state = states.get(loss.backfill)
        snapshot = isinstance(exact, str) and exact and parse_lsn(exact) > int(loss.backfill, 16)
        if snapshot or state == "done":
            offset, head = self._log.head()
            return self._change(table, loss, replace(loss, until=LogPosition(head, offset)))
        if state in ("failed", "cancelled"):
            message = f"lost its rows, and backfill {loss.backfill}, which reads them again, {_ENDED[state]}"
            resumed = f"millrace backfill --resume {loss.backfill}"
            remedy = f"Continue with: {resumed if state == 'failed' else self._command()}"
            return self._change(table, loss, replace(loss, message=message, remedy=remedy))
        return loss

    # -- losses and marks

    def _lose(self, table: TableId, difference: Difference) -> bool:
        """Record a loss and hold the table back. Returns whether the loss is new."""
        before, loss = self._losses.get(table), self._loss(table, difference)
        if before is not None and before.state == "renewing":
            return False
        if before is not None and before.blocks_writes and loss.blocks_writes:
            self._change(table, before, replace(loss, position=before.position, final=before.final or loss.final))
            return False
        self._change(table, before, loss)
        self._hold_back(table, loss.position, replace_newer=True)
        _log.error("sink %s: %s %s. %s", self._sink.name, table, loss.message, loss.remedy)
        return True

    def _loss(self, table: TableId, difference: Difference) -> Loss:
        copied = difference.whole_up_to
        if copied is not None and copied > ZERO_LSN and self._log.removed() < copied:
            offset, head = self._log.head()
            # several entries may end at one LSN, as in a snapshot: the copy may have only the first of them
            since = LogPosition(Lsn(copied - 1), self._log.seek(Lsn(copied - 1)))
            message = f"{difference.message}; what it lacks is applied again from the log"
            return Loss(message, "Wait; nothing else is needed.", since, "rewinding", until=LogPosition(head, offset))
        refill = f"To recreate it and read its rows again: {self._command()}" if difference.refill else ""
        remedy = " ".join(filter(None, [difference.remedy, refill]))
        position = self._marks[table].position
        return Loss(difference.message, remedy, position, refill=difference.refill, final=copied is not None)

    def _end_losses(self, good: Mapping[TableId, object]) -> None:
        """End the losses of tables that are as they were: the log has the changes that they missed meanwhile."""
        for table, loss in list(self._losses.items()):
            if table in good and loss.state == "lost" and not loss.final:
                self._change(table, loss, None)
                _log.warning("sink %s: %s is as it was and continues", self._sink.name, table)

    def _hold_back(self, table: TableId, position: LogPosition, *, replace_newer: bool) -> None:
        """Register a consumer for the table at this position. `replace_newer`: move back one that is further on."""
        name = consumer_name(self._sink.name, table)
        known = by_name(self._log.consumers()).get(name)
        if known is not None and (not replace_newer or known.reached <= position.reached):
            return
        if known is not None:
            self._log.forget(name)
        self._log.commit(name, position.reached, position.offset)

    def _position(self) -> LogPosition:
        mine = by_name(self._log.consumers()).get(self._sink.name)
        return LogPosition(mine.reached, mine.offset) if mine else LogPosition()

    def _concerns(self, table: TableId) -> bool:
        return self._requests.has(table) and table not in self._requests.skipped

    def _change(self, table: TableId, before: Loss | None, after: Loss | None) -> Loss | None:
        """Replace a loss, durably, unless it is no longer `before`. Returns the present one."""
        with self._changing:
            if self._losses.get(table) == before and before != after:
                others = {other: loss for other, loss in self._losses.items() if other != table}
                losses = others if after is None else {**others, table: after}
                self._files.write_losses(losses)
                self._losses = losses
            return self._losses.get(table)

    def _keep(self, marks: dict[TableId, StoredMark]) -> None:
        if marks != self._marks:
            self._files.write_marks(marks)
            self._marks = marks

    def _command(self) -> str:
        return f"millrace refill {self._sink.name}"

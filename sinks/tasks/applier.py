"""Applies batches whose rows are written by Spark tasks. The driver handles the rest, and touches no other row.

Order of a batch: the tasks' rows; the commit of what they staged; rows that tasks have set apart; truncates and removed
ranges; dead letters; the position. A crash in between repeats the batch, and a repeat changes nothing. Tasks may apply
a row that a truncate of the batch removes: it is gone after the truncate (`sinks.fold.removals`).
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import pyarrow as pa

from cdc import failpoint
from cdc.config.settings import Settings
from cdc.errors import GaveUp, LogCorrupt, SinkError, TableRefused
from cdc.log.shares import BatchProgress
from cdc.model import LOG_SCHEMA, TableId, TableSchema
from cdc.ports import Batch, Share, Sink, StagingSink
from sinks.apply.applier import Applier, ParallelTables
from sinks.apply.error_policy import table_error
from sinks.fold.arrow import ranked
from sinks.fold.folded import Folded, gather
from sinks.fold.removals import removal_batches
from sinks.tasks.outcome import Outcome
from sinks.tasks.unit_of_work import Assignment


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The shares of a batch, and its progress as text."""

    shares: Sequence[Share]
    progress: str | None


class TaskJob(Protocol):
    """The tasks of one batch."""

    def run(self, assignment: Assignment) -> Outcome:
        """Run all tasks and wait for them. May be called again: a repeat changes nothing."""

    def plan(self) -> BatchPlan:
        """What the tasks read, and where the batch ends."""


class TaskApplier(Applier):
    """An Applier whose live batches are applied by tasks. Replays, dead letters and held-back tables stay with the
    driver."""

    settings: Settings
    """For the tasks: see `sinks.tasks.unit_of_work.assignment_settings`. Set before the first batch."""

    def apply_by_tasks(self, job: TaskJob) -> None:
        """Like `apply`, for a batch whose rows tasks read and write."""
        with self.lock, self._stops_when_given_up():
            failpoint.reached("sink.before_apply")
            try:
                outcome = self._retry.run(lambda: self._attempt_tasks(job), self._retry.policy.attempts)
            except GaveUp:
                if self._retry.policy.then == "stop":
                    raise
                if (plan := job.plan()).shares:
                    self._apply(self._collected(plan))  # the changes become dead letters, if the store still fails
                return
            if not outcome.shares:  # a query that starts at the end of the log begins with an empty batch
                self._retry.succeeded()
                return
            self._apply_tables(list(self._set_apart(outcome)))
            self._apply_tables(self._removals(outcome))
            failpoint.reached("sink.after_apply")
            self._count(outcome)
            reached = _progress(outcome.progress)
            self._finish_batch(reached.end, reached.offset, outcome.newest, empty=not outcome.changes)

    def _attempt_tasks(self, job: TaskJob) -> Outcome:
        sink = self._store.connect()
        self._store.check_losses(sink)
        self._prepare_newest(sink)
        outcome = job.run(self._assignment())
        if (error := outcome.error()) is not None:
            raise error
        for table, refused in outcome.refusals():
            self._refuse_table(table, refused)
        self._commit_staged(sink, outcome)
        return outcome

    def _assignment(self) -> Assignment:
        lost = self._store.recorder.lost if self._store.recorder is not None else frozenset()
        letters = self._dead_letters.keys() if self.status.dead_letters else {}
        return Assignment(self.settings, self.held_back | lost, frozenset(self.tables), letters, self._store.generation)

    def _prepare_newest(self, sink: Sink) -> None:
        """Create and adapt tables here: tasks that did it at the same time would disturb each other."""
        for schema in self._log.schemas.newest():
            if schema.table in self.held_back or (self.tables and schema.table not in self.tables):
                continue
            try:
                self._store.prepare_for_batch(sink, schema)
            except TableRefused as error:
                self._refuse_table(schema.table, error)

    def _commit_staged(self, sink: Sink, outcome: Outcome) -> None:
        """One commit per table, of different tables in parallel. Raises Busy where a table must be staged again; a
        table whose commit is refused is held back."""
        tables = self._staged(outcome)
        if not tables or not isinstance(sink, StagingSink):
            return
        staging: StagingSink = sink

        def commit(table: TableId) -> TableRefused | None:
            try:
                for schema, contents in tables[table].items():
                    staging.commit_staged(schema, staging.plan(schema), contents)
            except SinkError as error:
                known = table_error(table, error)
                if not isinstance(known, TableRefused):
                    raise
                return known
            return None

        threads = sink.threads if isinstance(sink, ParallelTables) else 1
        with ThreadPoolExecutor(min(threads, len(tables)), thread_name_prefix=f"commit-{self.name}") as pool:
            refused = list(pool.map(commit, tables))
        for table, error in zip(tables, refused, strict=True):
            if error is not None:
                self._refuse_table(table, error)

    def _staged(self, outcome: Outcome) -> dict[TableId, dict[TableSchema, list[bytes]]]:
        """What tasks have staged, by table and schema; schemas in order."""
        found: dict[TableId, dict[TableSchema, list[bytes]]] = {}
        for piece in sorted(outcome.staged, key=lambda piece: (piece.table, piece.schema_id)):
            schema = self._schema(piece.table, piece.schema_id)
            if schema.table not in self.held_back:
                found.setdefault(schema.table, {}).setdefault(schema, []).append(piece.content)
        return found

    def _set_apart(self, outcome: Outcome) -> Iterator[Batch]:
        for piece in outcome.set_apart:
            schema = self._schema(piece.table, piece.schema_id)
            if schema.table not in self.held_back:
                yield Batch(schema, piece.rows())

    def _removals(self, outcome: Outcome) -> Sequence[Batch]:
        tables = {table for table in outcome.removals if TableId.parse(table) not in self.held_back}
        if not tables:
            return ()
        found = removal_batches(lambda: self._rows(outcome.shares), tables, self._log.schemas)
        self._store.changed()  # tasks remember a table's last truncate: they must read it again
        return found

    def _collected(self, plan: BatchPlan) -> Folded:
        """The batch, read and folded here."""
        rows = pa.concat_tables([LOG_SCHEMA.empty_table(), *self._rows(plan.shares)])
        reached = _progress(plan.progress)
        folded = gather(ranked(rows), self._log.schemas)
        return Folded(reached.end, folded.newest, folded.batches, reached.offset).only(tuple(self.tables))

    def _rows(self, shares: Iterable[Share]) -> Iterator[pa.Table]:
        return chain.from_iterable(self._log.read_share(share) for share in shares)

    def _schema(self, table: str, schema_id: int) -> TableSchema:
        return self._log.schemas.get(TableId.parse(table), schema_id)

    def _count(self, outcome: Outcome) -> None:
        for table, changes in outcome.changes.items():
            self.status.changes[table] = self.status.changes.get(table, 0) + changes
        self.status.visible.merge(outcome.visible.counts, outcome.visible.total)


def _progress(text: str | None) -> BatchProgress:
    if text is None:
        raise LogCorrupt("A batch of the log has no progress.", "Its end is unknown: report this.")
    return BatchProgress.decoded(text)

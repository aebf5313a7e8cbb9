"""The unit of work: one share of a batch, read from the log, folded, written to one store. A function of settings and
offsets, which does not know where it runs.

On a cluster it runs in a Spark task, next to others with other keys. It may run twice, late, or in a process that the
driver has given up: every store compares versions, so that changes nothing. It commits no position.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

import cdc.log
from cdc.config.settings import Settings
from cdc.errors import Lost, MillraceError, Rejected, RejectedItem, SinkError, TableRefused
from cdc.failpoint import reached
from cdc.model import TableId, TableSchema
from cdc.ports import Batch, Share, Sink, StagingSink
from sinks import registry
from sinks.apply.error_policy import table_error
from sinks.apply.store_connection import StoreConnection
from sinks.context import SinkContext
from sinks.fold.arrow import ranked
from sinks.fold.folded import Folded, gather, joined
from sinks.rows.images import columns
from sinks.tasks.outcome import Outcome, Piece, only_keys
from sinks.tasks.share_pieces import pieces

_PIECE_BYTES = 32 << 20
"""Rows folded at once: a share of a large transaction is applied in several pieces."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What all tasks of a batch need besides their shares. Spark sends it to the executors."""

    settings: Settings
    """The pipeline with this sink only, and without the credentials of the source."""
    held_back: frozenset[TableId] = frozenset()
    tables: frozenset[TableId] = frozenset()
    """The tables that the sink receives; empty: all."""
    dead_letters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By table, the keys that have dead letters: their rows are left to the driver, which merges both."""
    generation: int = 0
    """Grows when the driver has reconnected, created or truncated tables: stores opened before are opened again."""

    def takes(self, table: TableId) -> bool:
        """Whether changes of this table are applied."""
        return table not in self.held_back and (not self.tables or table in self.tables)


def run(assignment: Assignment, share: Share, part: str = "") -> Outcome:
    """Apply a share, which has the keys of this part. Errors of the store are in the outcome; other exceptions are the
    task's."""
    key = assignment.settings.sinks[0].name
    worker = _WORKERS.get(key)
    if worker is None or worker.settings != assignment.settings:
        if worker is not None:
            worker.close()
        worker = _WORKERS[key] = ShareWorker(assignment.settings)
    return worker.run(assignment, share, part)


class ShareWorker:
    """One sink in one worker process: its store and its log are opened once and used for many shares."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        own = settings.sinks[0]
        self._log = cdc.log.open_reader(settings)
        open_sink = partial(registry.open_sink, own, SinkContext(settings.state))
        self._store = StoreConnection(own.name, open_sink, None, lambda _lost: None)
        self._generation = 0
        self._part = ""

    def run(self, assignment: Assignment, share: Share, part: str) -> Outcome:
        """Apply a share. See `run`."""
        outcome = Outcome(shares=[share])
        self._part = part
        if assignment.generation != self._generation:
            self._store.disconnect()
            self._generation = assignment.generation
        try:
            sink = self._store.connect()
            for folded in self._folded(share, at_once=isinstance(sink, StagingSink)):
                reached("task.before_apply")
                self._apply(sink, folded, assignment, outcome)
        except MillraceError as error:
            if isinstance(error, Lost):
                self._store.disconnect()
            outcome.fail(error)
        reached("task.after_apply")
        return outcome

    def close(self) -> None:
        """Close the store."""
        self._store.disconnect()

    def _folded(self, share: Share, *, at_once: bool) -> Iterator[Folded]:
        """The share in pieces of whole keys, or as a whole for a sink that must get each key once."""
        changes = self._log.read_share(share)
        folded = (gather(ranked(piece), self._log.schemas) for piece in pieces(changes, _PIECE_BYTES))
        if not at_once:
            yield from folded
        elif found := list(folded):
            yield joined(found)

    def _apply(self, sink: Sink, folded: Folded, assignment: Assignment, outcome: Outcome) -> None:
        seen: dict[TableId, set[str]] = {}
        outcome.newest = max(filter(None, (outcome.newest, folded.newest)), default=None)
        for batch in folded.batches:
            table = batch.schema.table
            if not assignment.takes(table) or str(table) in outcome.refused:
                continue
            if batch.truncated or batch.removed:
                outcome.removals.add(str(table))
            apart, rows = only_keys(batch.rows, assignment.dead_letters.get(str(table), ()))
            if isinstance(sink, StagingSink):
                # A key that is deleted and written again has two rows, in order: one commit cannot hold both.
                again, rows = only_keys(rows, seen.setdefault(table, set()))
                apart = pa.concat_tables([apart, again])
                if _is_first_of_two(batch, folded):
                    apart, rows = pa.concat_tables([apart, rows]), rows.slice(0, 0)
                    seen[table] |= set(columns(batch.rows, "key")[0])
            outcome.set_rows_apart(batch.schema, apart)
            if rows.num_rows:
                self._write(sink, Batch(batch.schema, rows), outcome)

    def _write(self, sink: Sink, batch: Batch, outcome: Outcome) -> None:
        """Write the rows of one table; what the store does not take is in the outcome. Raises transient errors."""
        table = batch.schema.table
        try:
            self._store.prepare_for_batch(sink, batch.schema)
            rejected = self._written(sink, batch, outcome)
        except TableRefused as error:
            outcome.refused[str(table)] = (error.message, error.remedy)
            return
        except SinkError as error:
            known = table_error(table, error)
            if not isinstance(known, TableRefused):
                raise
            outcome.refused[str(table)] = (known.message, known.remedy)
            return
        apart, applied = only_keys(batch.rows, (item.key for item in rejected))
        outcome.set_rows_apart(batch.schema, apart)
        outcome.count(batch.schema, applied)

    def _written(self, sink: Sink, batch: Batch, outcome: Outcome) -> Sequence[RejectedItem]:
        """Write the rows, or stage them for the driver's commit; returns those that the store rejects."""
        if isinstance(sink, StagingSink):
            plan = sink.plan(batch.schema)
            if not plan:  # this table cannot be staged: the driver applies its rows
                return _all(batch)
            staged = sink.stage(batch, plan, self._part)
            outcome.staged.append(Piece(str(batch.schema.table), batch.schema.id, staged.content))
            return staged.rejected
        try:
            sink.apply(batch)
        except Rejected as rejected:
            return rejected.items
        return ()


def assignment_settings(settings: Settings, name: str) -> Settings:
    """What a task needs of a pipeline's settings: the log, the state folder and one sink."""
    own = tuple(sink for sink in settings.sinks if sink.name == name)
    return Settings(state=settings.state.absolute(), log=settings.log, sinks=own)


def _all(batch: Batch) -> Sequence[RejectedItem]:
    return [RejectedItem(str(batch.schema.table), key, 0, "not staged") for key in columns(batch.rows, "key")[0]]


def _is_first_of_two(batch: Batch, folded: Folded) -> bool:
    """Whether another batch of the same table and schema follows: this one then has the deletes that go before it."""
    same = [one for one in folded.batches if _name(one.schema) == _name(batch.schema)]
    return len(same) > 1 and batch is same[0]


def _name(schema: TableSchema) -> tuple[TableId, int]:
    return schema.table, schema.id


_WORKERS: dict[str, ShareWorker] = {}
"""By sink, in this process. Spark keeps a worker process for the next batches."""

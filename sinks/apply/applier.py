"""Applies folded batches to one sink. No Spark.

Order of a batch: truncate and rows of each table, dead letters made durable, then the position. A crash in between
repeats the batch, and a repeat changes nothing.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from cdc import failpoint
from cdc.config.settings import RetrySettings
from cdc.errors import GaveUp, MillraceError, Rejected, RejectedItem, SinkError, SourceError, TableRefused
from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Batch, LogReader, Offset, Sink
from sinks.apply.dead_letter_rows import batch_of, from_rejected, merged, rows_of, split, to_batch
from sinks.apply.dead_letters import DeadLetters
from sinks.apply.error_policy import attempts_of, rejected_after, table_error
from sinks.apply.errors import TableLost
from sinks.apply.retry import Retry
from sinks.apply.status import SinkStatus
from sinks.apply.store_connection import StoreConnection
from sinks.apply.timings import ages
from sinks.fingerprints import FingerprintRecorder
from sinks.fold.folded import Folded
from sinks.rows.images import STORED_ROW_MISSING, columns
from sinks.rows.read_sizes import Pieces, by_bytes

Note = Callable[[Lsn, Collection[TableId]], None]
"""Called after each applied batch with the position it reached and the tables that were skipped in it."""
Refuse = Callable[[TableId, TableRefused], None]
"""Called for a table that the store cannot take, under `Applier.lock` and before the position is committed. It must
add the table to `Applier.held_back` and make the log keep its changes."""
T = TypeVar("T")
_log = logging.getLogger(__name__)
_PREPARE_EVERY = 50
"""Batches after which tables that have no row yet are prepared."""


class Reselect(Protocol):
    """Reads the current rows from the source."""

    def __call__(self, schema: TableSchema, keys: Sequence[str]) -> Mapping[str, str]:
        """Key to full image; a missing key no longer exists in the source. Raises SourceError."""


@runtime_checkable
class ParallelTables(Protocol):
    """A sink whose `prepare` and `apply` may be called by several threads at once, for different tables."""

    @property
    def threads(self) -> int:
        """At most so many."""


class Applier:
    """Applies one sink's batches, one at a time. Calls `open_sink` when a batch needs it, and again after a loss."""

    def __init__(
        self,
        name: str,
        *,
        open_sink: Callable[[], Sink],
        log: LogReader,
        letters: DeadLetters,
        stop: threading.Event,
        reselect: Reselect | None = None,
        retry: RetrySettings | None = None,
        tables: Collection[TableId] = (),
        note: Note = lambda _reached, _skipped: None,
        watch: FingerprintRecorder | None = None,
    ) -> None:
        self.name = name
        self.status = SinkStatus(dead_letters=letters.count())
        self.tables = tables
        """The tables that this sink receives; empty: all."""
        self.refuse: Refuse | None = None
        """Without it, a table that the store cannot take stops the whole sink."""
        self.lock = threading.RLock()
        """Taken while a batch is applied."""
        self.held_back: frozenset[TableId] = frozenset()
        """Tables whose changes are skipped: paused and lost ones. Changed under `lock`."""
        self._log = log
        self._dead_letters = letters
        self._reselect = reselect
        self._note = note
        self._store = StoreConnection(name, open_sink, watch, self._skip)
        self._retry = Retry(name, self.status, retry or RetrySettings(), stop, self._store.disconnect)

    @property
    def facts(self) -> Mapping[str, str]:
        """What the sink shows to its operator."""
        return self._store.facts

    # -- batches

    def apply(self, folded: Folded) -> None:
        """Apply every table, then commit the position. Waits while the store is down; raises Stopped at the end.

        Tables in `held_back` are skipped, and `catch_up` applies their changes later. A table that the store refuses
        is skipped from this batch on.
        """
        with self.lock, self._stops_when_given_up():
            self._apply(folded)

    @contextmanager
    def _stops_when_given_up(self) -> Iterator[None]:
        try:
            yield
        except GaveUp as error:
            self.status.state, self.status.error = "stopped", str(error)
            raise

    def _apply(self, folded: Folded) -> None:
        failpoint.reached("sink.before_apply")
        self._apply_tables([batch for batch in folded.batches if batch.schema.table not in self.held_back])
        failpoint.reached("sink.after_apply")
        self._finish_batch(folded.reached, folded.offset, folded.newest, empty=not folded.batches)

    def _finish_batch(self, reached: Lsn, offset: Offset | None, newest: datetime | None, *, empty: bool) -> None:
        """All rows are in the store: commit the position, if the batch reaches one."""
        if reached:
            # before the position: after a crash the batch is applied again
            self._note(reached, self.held_back)
            self._retry_without_rows(lambda: self._store.record_position(reached))
            self._retry.run(lambda: self._log.commit(self.name, reached, offset))
            self.status.reached = reached
        self.status.newest = newest or self.status.newest
        self.status.batches += 1
        if empty or not self.status.batches % _PREPARE_EVERY:
            self._retry_without_rows(self._prepare_new_tables)
        self._store.tend()
        self._retry.succeeded()

    def _retry_without_rows(self, action: Callable[[], T]) -> T:
        return self._retry.run(action, attempts_of(None, self._retry.policy))

    def catch_up(self, folded: Folded) -> None:
        """Apply changes that were skipped, in the order of the log; commits no position.

        Raises TableRefused, or TableLost where the store has lost the table since.
        """
        with self.lock:
            for batch in folded.batches:
                self._apply_table(batch)
            self._retry.succeeded()

    def retry_dead_letters(self) -> int:
        """Apply the dead letters that are marked for retry; returns how many of them remain."""
        self.status.dead_letters = self._dead_letters.count()  # the CLI may have dropped some
        letters = self._dead_letters.to_retry() if self.status.dead_letters else {}
        if not letters:
            return 0
        with self.lock:
            for (table, schema_id), sizes in letters.items():
                schema = self._log.schemas.get(TableId.parse(table), schema_id)
                try:
                    for keys in by_bytes(sizes.items()):
                        self._apply_table(to_batch(schema, self._dead_letters.of_keys(table, keys)))
                except TableRefused as error:
                    self._refuse_table(schema.table, error)
                except TableLost:
                    _log.debug("sink %s: dead letters of %s wait until it is filled again", self.name, table)
            self._retry.succeeded()
        return sum(map(len, self._dead_letters.to_retry().values()))

    # -- the store

    def open_store(self) -> None:
        """Open the store before the first batch; waits for it as a batch does."""
        with self.lock:
            self._retry.run(self._prepare_new_tables)
            self._retry.succeeded()

    def try_table(self, table: TableId) -> None:
        """Prepare a table for its newest schema. Raises TableRefused if the store still cannot take it."""
        schema = next((one for one in self._log.schemas.newest() if one.table == table), None)
        if schema is not None:
            with self.lock:
                self._retry.run(lambda: self._store.prepare(self._store.connect(), schema))
                self._store.expect_older_schema(table)

    def check_losses(self) -> None:
        """Check the store for lost tables, if that is due and no batch is being applied.

        Tried once, without waiting: a batch must be able to start and to wait as its own retry policy says.
        """
        known = self._store.is_open or self.status.state == "waiting"
        if self._store.recorder is None or not known or not self.lock.acquire(blocking=False):
            return
        try:
            self._store.check_losses(self._store.connect())
            if self.status.state == "waiting":
                self._retry.succeeded()
        except MillraceError as error:
            if not error.transient:
                raise
            self._store.disconnect()
            if self.status.state == "running":
                self.status.state, self.status.error = "waiting", str(error)
        finally:
            self.lock.release()

    def recreate(self, schema: TableSchema) -> bool:
        """Replace a lost table by an empty one; False if this kind of sink cannot. Raises SinkError where that is
        impossible now."""
        with self.lock:
            return self._store.recreate(schema)

    def finish(self, deadline: float) -> None:
        """Wait at most `deadline` seconds for the current batch, then close the sink."""
        if self.lock.acquire(timeout=deadline):
            self.lock.release()
        self._store.close()

    def _skip(self, tables: frozenset[TableId]) -> None:
        self.held_back |= tables

    def _prepare_new_tables(self) -> None:
        """Open the store and prepare tables that have no row yet, so that readers find them empty."""
        sink = self._store.connect()
        self._store.check_losses(sink)
        created: list[TableSchema] = []
        for schema in self._log.schemas.newest():
            if self._store.is_prepared(schema.table) or schema.table in self.held_back:
                continue
            if self.tables and schema.table not in self.tables:
                continue
            try:
                self._store.create(sink, schema)
                created.append(schema)
            except TableRefused as error:
                if self.refuse is not None:
                    self._refuse_table(schema.table, error)
                else:
                    _log.warning("sink %s: table %s is not prepared yet: %s", self.name, schema.table, error)
                self._store.expect_older_schema(schema.table)
        self._store.mark(sink, created)
        for schema in created:
            self._store.expect_older_schema(schema.table)

    # -- the tables of a batch

    def _apply_tables(self, batches: Sequence[Batch]) -> None:
        """Apply the batches of each table in their order; different tables in parallel, where the store allows it.

        Tables that the store cannot take are reported once the others are done.
        """
        tables: dict[TableId, list[Batch]] = {}
        for batch in batches:
            tables.setdefault(batch.schema.table, []).append(batch)
        sink = self._retry_without_rows(self._store.connect) if len(tables) > 1 else None
        threads = sink.threads if isinstance(sink, ParallelTables) else 1
        if threads == 1:
            refused = [self._apply_in_order(group) for group in tables.values()]
        else:
            with ThreadPoolExecutor(min(threads, len(tables)), thread_name_prefix=f"table-{self.name}") as pool:
                refused = list(pool.map(self._apply_in_order, tables.values()))
        for table, error in zip(tables, refused, strict=True):
            if error is not None:
                self._refuse_table(table, error)

    def _apply_in_order(self, batches: Sequence[Batch]) -> TableRefused | None:
        """Returns why the store cannot take the table, if so; part of the batches may be in the store then."""
        try:
            for batch in batches:
                if batch.schema.table not in self.held_back:  # a check may have found it lost in the meantime
                    self._apply_unless_lost(batch)
                failpoint.reached("sink.mid_batch")
        except TableRefused as error:
            return error
        return None

    def _apply_unless_lost(self, batch: Batch) -> None:
        try:
            self._apply_table(batch)
        except TableLost:
            _log.debug("sink %s: changes of %s stay in the log", self.name, batch.schema.table)

    def _refuse_table(self, table: TableId, error: TableRefused) -> None:
        """Skip this table from now on. Raises the error where no callback makes the log keep its changes."""
        if self.refuse is None:
            self.status.state, self.status.error = "refused", str(error)
            raise error
        self.refuse(table, error)

    # -- one table

    def _apply_table(self, batch: Batch) -> None:
        """Apply a batch; rows that the store rejects become dead letters, and applied ones end theirs."""
        table = str(batch.schema.table)
        if batch.truncated:
            self._dead_letters.truncate(table, batch.truncated)
        if batch.removed:
            self._dead_letters.remove(table, batch.removed)
        keys = columns(batch.rows, "key")[0] if self.status.dead_letters else []
        sizes = self._dead_letters.sizes(table, keys) if keys else {}
        for piece in self._merged_with_dead_letters(batch, sizes) if sizes else [batch]:
            rejected = self._reselected(piece, self._attempted(piece))
            if rejected:
                self._add_dead_letters(piece, rejected)
            if sizes:
                self._resolve_dead_letters(piece, sizes, rejected)
            if rejected or sizes:
                self.status.dead_letters = self._dead_letters.count()
        self.status.changes[table] = self.status.changes.get(table, 0) + batch.rows.num_rows
        self.status.visible.add(ages(batch.rows, datetime.now(UTC)))

    def _attempted(self, batch: Batch) -> Sequence[RejectedItem]:
        """The rows that the store rejects for good; all rows, where the sink gives up and its policy is `park`."""
        try:
            return self._retry.run(lambda: self._attempt(batch), attempts_of(batch, self._retry.policy))
        except GaveUp as error:
            if self._retry.policy.then == "stop":
                raise
            _log.warning("sink %s: %s Its changes become dead letters.", self.name, error)
            return rejected_after(error, batch)

    def _attempt(self, batch: Batch) -> Sequence[RejectedItem]:
        sink = self._store.connect()
        if self._store.is_lost(sink, batch.schema.table):
            raise TableLost
        self._store.prepare_for_batch(sink, batch.schema)
        try:
            sink.apply(batch)
        except Rejected as rejected:
            return rejected.items
        except SinkError as error:
            raise table_error(batch.schema.table, error) from error
        return ()

    def _reselected(self, batch: Batch, rejected: Sequence[RejectedItem]) -> Sequence[RejectedItem]:
        """Read rows whose stored columns were missing from the source and apply those; returns what is still rejected.

        They get the version of their change, though they may reflect later ones: those follow, and must not be
        ignored as older. A row that no longer exists in the source needs nothing: its delete follows, too.
        """
        missing = [item for item in rejected if item.reason == STORED_ROW_MISSING]
        reselect = self._reselect
        if not missing or reselect is None:
            return rejected
        remaining = [item for item in rejected if item.reason != STORED_ROW_MISSING]
        pieces = Pieces()
        for piece in pieces.of(missing):
            keys = [item.key for item in piece]
            try:
                found = self._retry.run(partial(reselect, batch.schema, keys))
            except SourceError as error:
                _log.warning("sink %s: %s", self.name, error)
                remaining += piece
                continue
            pieces.record(len(keys), sum(map(len, found.values())))
            rows = [
                {**row, "after": found[row["key"]], "unchanged": []}
                for row in rows_of(batch, keys)
                if row["key"] in found
            ]
            remaining += self._attempted(batch_of(batch.schema, rows))
        return remaining

    # -- dead letters

    def _merged_with_dead_letters(self, batch: Batch, sizes: Mapping[str, int]) -> Iterator[Batch]:
        """The batch in pieces, with partial rows filled from the dead letters of their keys."""
        parts = split(batch, sizes)
        if parts.rest is not None:
            yield parts.rest
        for keys in parts.pieces:
            yield merged(parts.partial, keys, self._dead_letters.of_keys(str(batch.schema.table), keys))

    def _add_dead_letters(self, batch: Batch, rejected: Sequence[RejectedItem]) -> None:
        letters = from_rejected(batch, rejected, datetime.now(UTC))
        self._dead_letters.add(letters)
        _log.warning(
            "sink %s refused %d change(s) of %s; see: millrace dlq list", self.name, len(letters), batch.schema.table
        )

    def _resolve_dead_letters(self, batch: Batch, keys: Collection[str], rejected: Sequence[RejectedItem]) -> None:
        """Delete the dead letters of keys that this piece has applied."""
        still = {item.key for item in rejected}
        applied = [(row["key"], row["version"]) for row in rows_of(batch, [key for key in keys if key not in still])]
        self._dead_letters.resolve(str(batch.schema.table), applied)

"""The connection of one sink to its store: opened when needed, closed after a loss, tables prepared, losses checked."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from cdc.errors import MillraceError, SinkError
from cdc.fence import guard
from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Sink
from sinks.apply.error_policy import check_key, table_error
from sinks.fingerprints import Fingerprinted, FingerprintRecorder

_log = logging.getLogger(__name__)


@runtime_checkable
class Described(Protocol):
    """A sink with facts to show to its operator."""

    def facts(self) -> Mapping[str, str]:
        """Names and values, shown unchanged."""


@runtime_checkable
class Tended(Protocol):
    """A sink with work to do besides its batches, in one process: many tasks may write to its store."""

    def after_batch(self) -> None:
        """Called after each batch of the pipeline, never in a task. Returns soon, and raises nothing."""


class StoreConnection:
    """One sink's store. Several threads may use it at once for different tables, each with the sink that `connect`
    gave it: another thread may disconnect in between, and a sink that was opened since has nothing prepared."""

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        recorder: FingerprintRecorder | None,
        on_lost: Callable[[frozenset[TableId]], None],
    ) -> None:
        self.recorder = recorder
        self.facts: Mapping[str, str] = {}
        self._name = name
        self._open_sink = open_sink
        self._on_lost = on_lost
        self._sink: Sink | None = None
        self._lock = threading.Lock()
        self.generation = 0
        """Grows when the store was opened, or changed in a way that other connections to it must notice."""
        self._prepared: dict[TableId, int] = {}
        """By table, the schema id that it was prepared for; -1: its next batch prepares it again."""

    @property
    def is_open(self) -> bool:
        return self._sink is not None

    def connect(self) -> Sink:
        """The open sink. May raise Busy or Lost."""
        with self._lock:
            if self._sink is None:
                self._sink = self._open_sink()
                self.generation += 1
                if self.recorder is not None:
                    self.recorder.connected()
                self._prepared.clear()
                self.facts = self._sink.facts() if isinstance(self._sink, Described) else {}
            return self._sink

    def changed(self) -> None:
        """Tables were created, changed or truncated: other connections to the store must open it again."""
        self.generation += 1

    def disconnect(self) -> None:
        """Close the connection, whatever its state; the next use opens another."""
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close()
            except (MillraceError, OSError):
                _log.debug("sink %s: closing a broken connection failed", self._name)

    def close(self) -> None:
        """Close the sink at the end of the process."""
        if self._sink is not None:
            self._sink.close()

    def check_losses(self, sink: Sink) -> frozenset[TableId]:
        """Compare the store with what was written, if a check is due; returns the tables newly found lost."""
        if self.recorder is None:
            return frozenset()
        with self._lock:
            lost = self.recorder.compare_marks(sink)
            self._on_lost(lost)
        return lost

    def is_lost(self, sink: Sink, table: TableId) -> bool:
        """Whether the store no longer has the rows of this table; checks first, if that is due."""
        return table in self.check_losses(sink) or (self.recorder is not None and table in self.recorder.lost)

    def record_position(self, reached: Lsn) -> None:
        """Have the store remember that it has everything up to here."""
        if self.recorder is not None:
            sink = self.connect()
            self.check_losses(sink)  # after a reconnect, another store must not get the position of this one
            self.recorder.record_position(sink, reached)

    def tend(self) -> None:
        """After a batch: let the sink do what it does in one process only."""
        sink = self._sink
        if isinstance(sink, Tended):
            sink.after_batch()

    # -- tables

    def prepare(self, sink: Sink, schema: TableSchema) -> None:
        """Create or adapt a table, and mark it. Raises TableRefused where the store cannot take it."""
        self.create(sink, schema)
        self.mark(sink, [schema])

    def create(self, sink: Sink, schema: TableSchema) -> None:
        """Create or adapt a table; it gets no rows before `mark`. Raises TableRefused where the store cannot take
        it."""
        check_key(schema)
        try:
            sink.prepare(schema)
        except SinkError as error:
            raise table_error(schema.table, error) from error
        self.changed()

    def mark(self, sink: Sink, schemas: Sequence[TableSchema]) -> None:
        """Leave a fingerprint in tables that were created."""
        if self.recorder is not None and schemas:
            with self._lock:
                self.recorder.prepared(sink, schemas)

    def prepare_for_batch(self, sink: Sink, schema: TableSchema) -> None:
        """Prepare a table, unless it was prepared for this schema or a newer one since the store was opened."""
        if self._prepared.get(schema.table, -1) < schema.id:
            self.prepare(sink, schema)
            self._prepared[schema.table] = schema.id

    def is_prepared(self, table: TableId) -> bool:
        """Whether the table was prepared, or tried, since the store was opened."""
        return table in self._prepared

    def expect_older_schema(self, table: TableId) -> None:
        """Mark a table as prepared. Its next batch prepares it again: its schema may be an older one."""
        self._prepared[table] = -1

    def recreate(self, schema: TableSchema) -> bool:
        """Replace a lost table by an empty one; False if this kind of sink cannot. Raises SinkError where that is
        impossible now."""
        guard.require()
        sink = self.connect()
        if not isinstance(sink, Fingerprinted) or self.recorder is None:
            return False
        sink.recreate(schema)
        self.prepare(sink, schema)
        self.expect_older_schema(schema.table)
        self.recorder.recreated(sink, schema)
        return True

"""Bringing folded batches into one sink: connecting, waiting, parking. No Spark.

Order of a batch: truncate and rows of each table, dead letters made durable, then the position. A crash in between
repeats the batch, and a repeat changes nothing.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc

from cdc import backoff, failpoint
from cdc.config.settings import RetrySettings
from cdc.errors import (
    Busy,
    GaveUp,
    Lost,
    MillraceError,
    Rejected,
    RejectedItem,
    SinkError,
    SourceError,
    StoreRefused,
    TableRefused,
)
from cdc.json_text.members import splice
from cdc.model import ZERO_LSN, Lsn, TableId, TableSchema
from cdc.ports import Batch, LogReader, Sink
from sinks.apply.dead_letters import DeadLetter, DeadLetters
from sinks.apply.timings import Histogram, ages
from sinks.fingerprints import Fingerprinted, FingerprintRecorder
from sinks.fold.folded import Folded
from sinks.fold.spark import FOLDED
from sinks.rows.images import STORED_ROW_MISSING, columns, partial_first
from sinks.rows.read_sizes import Pieces, by_bytes

T = TypeVar("T")
Note = Callable[[Lsn, Collection[TableId]], None]
"""Told of each batch that was applied: up to where, and which tables were passed over in it."""
Refuse = Callable[[TableId, TableRefused], None]
"""Told of a table that the store cannot take, with the applier's turn and before the position moves. It must hold the
table (`Applier.held`) and see to it that its changes are kept."""
_log = logging.getLogger(__name__)
_MEET_EVERY = 50


class Reselect(Protocol):
    """Reads rows from the source as they are now."""

    def __call__(self, schema: TableSchema, keys: Sequence[str]) -> Mapping[str, str]:
        """Key to full image; a key that is missing is gone from the source. Raises SourceError."""


@runtime_checkable
class Described(Protocol):
    """A sink that has something to tell its operator."""

    def facts(self) -> Mapping[str, str]:
        """Names and values, to be shown as they are."""


@runtime_checkable
class SideBySide(Protocol):
    """A sink whose `prepare` and `apply` may be called by several threads at once, for different tables."""

    @property
    def threads(self) -> int:
        """At most so many."""


class Stopped(Exception):
    """The process is ending; what was not finished is done again at the next start."""


class TableLost(Exception):
    """The store no longer holds what was written of this table: its changes wait in the log."""


@dataclass(slots=True)
class SinkStatus:
    """What a sink last did: written by its query, read by whoever shows it."""

    state: str = "starting"
    reached: Lsn = ZERO_LSN
    newest: datetime | None = None
    changes: dict[str, int] = field(default_factory=dict)
    batches: int = 0
    batch_ms: int = 0
    error: str = ""
    dead_letters: int = 0
    restarts: int = 0
    visible: Histogram = field(default_factory=Histogram)
    batch_times: Histogram = field(default_factory=Histogram)

    def took(self, seconds: float) -> None:
        """Note how long the last batch took."""
        self.batch_ms = int(seconds * 1000)
        self.batch_times.add([seconds])


class Applier:
    """One sink's batches, one at a time. `open_sink` is called when a batch needs it, and again after a loss."""

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
        note: Note = lambda _reached, _held: None,
        watch: FingerprintRecorder | None = None,
    ) -> None:
        self.name = name
        self.status = SinkStatus(dead_letters=letters.count())
        self.facts: Mapping[str, str] = {}
        self._open_sink = open_sink
        self._log = log
        self._letters = letters
        self._stop = stop
        self._reselect = reselect
        self._retry = retry or RetrySettings()
        self.tables = tables
        """The tables that it is given; none: all."""
        self.refuse: Refuse | None = None
        """Without it, a table that the store cannot take stops all of them."""
        self._note = note
        self._watch = watch
        self._sink: Sink | None = None
        self._door = threading.Lock()
        self._prepared: dict[TableId, int] = {}
        self.turn = threading.RLock()
        self.held: frozenset[TableId] = frozenset()

    def apply(self, folded: Folded) -> None:
        """Apply every table, then commit the position. Waits for a store that is down; raises Stopped at the end.

        Tables that are held are passed over: whoever holds them brings them up to date later (`catch_up`). So is one
        that the store cannot take, from this batch on.
        """
        with self.turn:
            failpoint.reached("sink.before_apply")
            self._side_by_side([batch for batch in folded.batches if batch.schema.table not in self.held])
            failpoint.reached("sink.after_apply")
            if folded.reached:
                self._note(folded.reached, self.held)  # before the position: what crashes in between is applied again
                reached, offset = folded.reached, folded.offset
                self._retried(lambda: self._passed(reached))
                self._retried(lambda: self._log.commit(self.name, reached, offset))
                self.status.reached = folded.reached
            self.status.newest = folded.newest or self.status.newest
            self.status.batches += 1
            if not folded.batches or not self.status.batches % _MEET_EVERY:
                self._retried(self._meet)
            self._well()

    def catch_up(self, folded: Folded) -> None:
        """Apply changes that were passed over, in the order of the log; no position moves.

        Raises TableRefused, or TableLost where the store lost the table meanwhile.
        """
        with self.turn:
            for batch in folded.batches:
                self._table(batch)
            self._well()

    def retry_letters(self) -> int:
        """Try the letters again that somebody asked for; returns how many are left of them."""
        self.status.dead_letters = self._letters.count()  # somebody may have dropped some
        letters = self._letters.to_retry() if self.status.dead_letters else {}
        if not letters:
            return 0
        with self.turn:
            for (table, schema_id), sizes in letters.items():
                schema = self._log.schemas.get(TableId.parse(table), schema_id)
                try:
                    for keys in by_bytes(sizes.items()):
                        rows = [_row(letter) for letter in self._letters.of_keys(table, keys).values()]
                        self._table(Batch(schema, pa.Table.from_pylist(rows, schema=FOLDED)))
                except TableRefused as error:
                    self._refused(schema.table, error)
                except TableLost:
                    _log.debug("sink %s: letters of %s wait until it is filled again", self.name, table)
            self._well()
        return sum(map(len, self._letters.to_retry().values()))

    def finish(self, deadline: float) -> None:
        """Wait for the batch in hand, at most so many seconds, and let the store go."""
        if self.turn.acquire(timeout=deadline):
            self.turn.release()
        if self._sink is not None:
            self._sink.close()

    def greet(self) -> None:
        """Open the store ahead of the first batch, waiting for it like a batch does."""
        with self.turn:
            self._retried(self._meet)
            self._well()

    def probe(self, table: TableId) -> None:
        """Make room for a table as the log knows it now. Raises TableRefused if the store still cannot take it."""
        schema = next((one for one in self._log.schemas.newest() if one.table == table), None)
        if schema is not None:
            with self.turn:
                self._retried(lambda: self._prepare(self._connect(), schema))
                self._prepared[table] = -1  # its next batch may have an older schema, and prepares it again

    def look(self) -> None:
        """Compare what the store shows of itself, if it is time for that and no batch is being applied.

        Tried once: a batch must be able to come, and to wait for a store that is down as its policy says.
        """
        known = self._sink is not None or self.status.state == "waiting"
        if self._watch is None or not known or not self.turn.acquire(blocking=False):
            return
        try:
            self._look(self._connect())
            if self.status.state == "waiting":
                self._well()
        except MillraceError as error:
            if not error.transient:
                raise
            self._lose()
            if self.status.state == "running":
                self.status.state, self.status.error = "waiting", str(error)
        finally:
            self.turn.release()

    def renew(self, schema: TableSchema) -> None:
        """Make a lost table's place in the store new and empty. Raises SinkError where that cannot be."""
        with self.turn:
            sink = self._connect()
            if isinstance(sink, Fingerprinted) and self._watch is not None:
                sink.renew(schema)
                self._prepare(sink, schema)
                self._prepared[schema.table] = -1
                self._watch.renewed(sink, schema)

    def _look(self, sink: Sink) -> frozenset[TableId]:
        """The tables that are held from now on, since the store no longer shows what was written of them."""
        if self._watch is None:
            return frozenset()
        with self._door:
            fresh = self._watch.look(sink)
            self.held |= fresh
        return fresh

    def _passed(self, reached: Lsn) -> None:
        if self._watch is not None:
            sink = self._connect()
            self._look(sink)  # after a reconnect: another store must not be told how far this one was
            self._watch.passed(sink, reached)

    def _connect(self) -> Sink:
        with self._door:
            if self._sink is None:
                self._sink = self._open_sink()
                if self._watch is not None:
                    self._watch.connected()
                self._prepared.clear()
                self.facts = self._sink.facts() if isinstance(self._sink, Described) else {}
            return self._sink

    def _meet(self) -> None:
        """Open the store and make room for tables that have no row yet, so that their readers find them empty."""
        sink = self._connect()
        self._look(sink)
        for schema in self._log.schemas.newest():
            if schema.table in self._prepared or schema.table in self.held:
                continue
            if self.tables and schema.table not in self.tables:
                continue
            try:
                self._prepare(sink, schema)
            except TableRefused as error:
                if self.refuse is not None:
                    self._refused(schema.table, error)
                else:
                    _log.warning("sink %s: no room is made for %s yet: %s", self.name, schema.table, error)
            self._prepared[schema.table] = -1  # its first batch prepares it again: its schema may be an older one

    # -- one table

    def _side_by_side(self, batches: Sequence[Batch]) -> None:
        """The batches of a table in their order; different tables at once, where the store allows it.

        Tables that the store cannot take are left out, once the others are done.
        """
        tables: dict[TableId, list[Batch]] = {}
        for batch in batches:
            tables.setdefault(batch.schema.table, []).append(batch)
        sink = self._retried(self._connect) if len(tables) > 1 else None
        threads = sink.threads if isinstance(sink, SideBySide) else 1
        if threads == 1:
            refused = [self._in_order(group) for group in tables.values()]
        else:
            with ThreadPoolExecutor(min(threads, len(tables)), thread_name_prefix=f"table-{self.name}") as pool:
                refused = list(pool.map(self._in_order, tables.values()))
        for table, error in zip(tables, refused, strict=True):
            if error is not None:
                self._refused(table, error)

    def _in_order(self, batches: Sequence[Batch]) -> TableRefused | None:
        """Returns why the store cannot take the table, if it cannot; part of it may be in the store then."""
        try:
            for batch in batches:
                if batch.schema.table not in self.held:  # a look at the store may have found it lost meanwhile
                    self._live(batch)
                failpoint.reached("sink.mid_batch")
        except TableRefused as error:
            return error
        return None

    def _refused(self, table: TableId, error: TableRefused) -> None:
        """Have the table wait alone. Raises the error where nobody would keep its changes."""
        if self.refuse is None:
            self.status.state, self.status.error = "refused", str(error)
            raise error
        self.refuse(table, error)

    def _table(self, batch: Batch) -> None:
        table = str(batch.schema.table)
        if batch.truncated:
            self._letters.truncate(table, batch.truncated)
        if batch.removed:
            self._letters.remove(table, batch.removed)
        keys = columns(batch.rows, "key")[0] if self.status.dead_letters else []
        parked = self._letters.sizes(table, keys) if keys else {}
        for piece in self._onto_letters(batch, parked) if parked else [batch]:
            refused = self._reselected(piece, self._attempted(piece))
            if refused:
                self._park(piece, refused)
            if parked:
                self._resolve(piece, parked, refused)
            if refused or parked:
                self.status.dead_letters = self._letters.count()
        self.status.changes[table] = self.status.changes.get(table, 0) + batch.rows.num_rows
        self.status.visible.add(ages(batch.rows, datetime.now(UTC)))

    def _onto_letters(self, batch: Batch, parked: Mapping[str, int]) -> Iterator[Batch]:
        """The batch with partial rows filled from what is parked, in pieces: of these a letter may hold large columns.

        The store never got what is parked, so its own columns are too old to keep.
        """
        lacking, whole = partial_first(batch.rows)
        on = pc.is_in(lacking.column("key"), value_set=pa.array(list(parked), pa.string()))
        laid, rest = lacking.filter(on), pa.concat_tables([whole, lacking.filter(pc.invert(on))])
        if rest.num_rows or batch.truncated or batch.removed or not laid.num_rows:
            yield replace(batch, rows=rest)
        for keys in by_bytes((key, parked[key]) for key in columns(laid, "key")[0]):
            piece = Batch(
                batch.schema, laid.filter(pc.is_in(laid.column("key"), value_set=pa.array(keys, pa.string())))
            )
            yield _filled(piece, self._letters.of_keys(str(batch.schema.table), keys))

    def _live(self, batch: Batch) -> None:
        try:
            self._table(batch)
        except TableLost:
            _log.debug("sink %s: %s waits in the log", self.name, batch.schema.table)
        except GaveUp as error:
            self.status.state, self.status.error = "stopped", str(error)
            raise

    def _attempted(self, batch: Batch) -> Sequence[RejectedItem]:
        """What the store refuses for ever; all of it, where the policy says to park what a store does not take."""
        try:
            # no letter can hold a truncate or a removed range: without it, rows that are gone would stay
            limit = 0 if (batch.truncated or batch.removed) and self._retry.then == "park" else self._retry.attempts
            return self._retried(lambda: self._attempt(batch), limit)
        except GaveUp as error:
            if self._retry.then == "stop":
                raise
            _log.warning("sink %s: %s Its batch is parked.", self.name, error)
            rows = zip(*(batch.rows.column(name).to_pylist() for name in ("key", "version")), strict=True)
            table = str(batch.schema.table)
            return [RejectedItem(table, key, version, f"given up: {error.why.message}") for key, version in rows]

    def _attempt(self, batch: Batch) -> Sequence[RejectedItem]:
        sink = self._connect()
        table = batch.schema.table
        if table in self._look(sink) or (self._watch is not None and table in self._watch.lost):
            raise TableLost
        if self._prepared.get(table, -1) < batch.schema.id:
            self._prepare(sink, batch.schema)
            self._prepared[table] = batch.schema.id
        try:
            sink.apply(batch)
        except Rejected as rejected:
            return rejected.items
        except SinkError as error:
            raise _of_table(table, error) from error
        return ()

    def _prepare(self, sink: Sink, schema: TableSchema) -> None:
        if not schema.key and (schema.oid or schema.identity != "d"):  # a foreign log does not say which columns are it
            raise TableRefused(str(schema.table), _keyless(schema))
        try:
            sink.prepare(schema)
        except SinkError as error:
            raise _of_table(schema.table, error) from error
        if self._watch is not None:
            with self._door:
                self._watch.prepared(sink, schema)

    def _reselected(self, batch: Batch, refused: Sequence[RejectedItem]) -> Sequence[RejectedItem]:
        """Read rows from the source whose stored columns were missing; returns what is refused even so.

        They get the version of their change, though they may reflect later ones: those come, and must not be refused.
        A row that is gone from the source needs nothing: its delete comes too.
        """
        missing = [item for item in refused if item.reason == STORED_ROW_MISSING]
        reselect = self._reselect
        if not missing or reselect is None:
            return refused
        still = [item for item in refused if item.reason != STORED_ROW_MISSING]
        pieces = Pieces()
        for piece in pieces.of(missing):
            keys = [item.key for item in piece]
            try:
                found = self._retried(partial(reselect, batch.schema, keys))
            except SourceError as error:
                _log.warning("sink %s: %s", self.name, error)
                still += piece
                continue
            pieces.weighed(len(keys), sum(map(len, found.values())))
            rows = [
                {**row, "after": found[row["key"]], "unchanged": []}
                for row in _rows_of(batch, keys)
                if row["key"] in found
            ]
            still += self._attempted(Batch(batch.schema, pa.Table.from_pylist(rows, schema=FOLDED)))
        return still

    def _park(self, batch: Batch, refused: Sequence[RejectedItem]) -> None:
        reasons = {item.key: item.reason for item in refused}
        now = datetime.now(UTC)
        rows = _rows_of(batch, list(reasons))
        self._letters.park(
            [
                DeadLetter(
                    **{**row, "unchanged": tuple(row["unchanged"] or ())}, reason=reasons[row["key"]], parked_at=now
                )
                for row in rows
            ]
        )
        _log.warning(
            "sink %s refused %d change(s) of %s; see: millrace dlq list", self.name, len(rows), batch.schema.table
        )

    def _resolve(self, batch: Batch, parked: Collection[str], refused: Sequence[RejectedItem]) -> None:
        still = {item.key for item in refused}
        applied = [(row["key"], row["version"]) for row in _rows_of(batch, [key for key in parked if key not in still])]
        self._letters.resolve(str(batch.schema.table), applied)

    # -- waiting

    def _retried(self, action: Callable[[], T], attempts: int = 0) -> T:
        """Until it works or the process ends: a store that is down costs time, never changes.

        With `attempts`, raises GaveUp after so many failures.
        """
        failures = 0
        while True:
            try:
                return action()
            except MillraceError as error:
                if isinstance(error, TableRefused):
                    raise
                if not error.transient:
                    self.status.state, self.status.error = "refused", str(error)
                    raise
                failures += 1
                if failures == attempts:
                    self._lose()
                    raise GaveUp(f"{error.message} It was tried {attempts} times.", error) from None
                self._wait(error, failures)

    def _wait(self, error: MillraceError, failures: int) -> None:
        if isinstance(error, Lost):
            self._lose()
        if failures == 1 or not failures % 20:
            _log.warning("sink %s waits: %s", self.name, error)
        self.status.state, self.status.error = "waiting", str(error)
        asked = error.retry_after if isinstance(error, Busy) else 0.0
        growing = backoff.delay(failures, self._retry.first_seconds, self._retry.longest_seconds)
        if self._stop.wait(max(asked, growing)):
            raise Stopped

    def _lose(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close()
            except (MillraceError, OSError):
                _log.debug("sink %s was gone before it was closed", self.name)

    def _well(self) -> None:
        if self.status.state != "running":
            _log.info("sink %s runs", self.name)
        self.status.state, self.status.error = "running", ""


def _of_table(table: TableId, error: SinkError) -> SinkError:
    """What a store answered to one table: the table's own trouble, unless it passes or concerns all of them."""
    return error if error.transient or isinstance(error, StoreRefused) else TableRefused(str(table), error)


def _keyless(schema: TableSchema) -> SinkError:
    return SinkError(
        f"table {schema.table} has no key, so no store could tell its rows apart or delete one.",
        f"Give it a primary key, or run: ALTER TABLE {schema.table} REPLICA IDENTITY FULL.",
    )


def _rows_of(batch: Batch, keys: Sequence[str]) -> list[dict[str, Any]]:
    wanted = pc.is_in(batch.rows.column("key"), value_set=pa.array(keys, pa.string()))
    return batch.rows.filter(wanted).to_pylist()


def _row(letter: DeadLetter) -> dict[str, Any]:
    return {name: getattr(letter, name) for name in FOLDED.names}


def _filled(batch: Batch, parked: Mapping[str, DeadLetter]) -> Batch:
    """Fill partial rows from letters that are older."""
    rows = batch.rows.to_pylist()
    for row in rows:
        letter = parked.get(row["key"])
        if letter is None or letter.version >= row["version"] or not row["unchanged"] or letter.after is None:
            continue
        after, missing = splice(row["after"], letter.after, row["unchanged"])
        row.update(after=after, unchanged=list(missing))
    return replace(batch, rows=pa.Table.from_pylist(rows, schema=FOLDED))

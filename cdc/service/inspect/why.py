"""The history of a row: every event of its key in the log, its outcome and batch in each sink, and the version that
each store has now.

Returns positions, operations, versions and times, never the row's values. The trap: it reads the log from its start, so
its duration grows with the log; interactive callers limit the time.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.settings import Settings
from cdc.errors import ConfigError, MillraceError
from cdc.key_range import KeyRange
from cdc.model import Lsn, TableId, format_lsn
from cdc.ports import LogReader
from cdc.service.inspect.stored_versions import StoredVersion, stored_versions
from cdc.service.inspect.verification import parsed_table
from cdc.service.state.batch_history import AppliedBatch, BatchHistoryReader
from cdc.service.state.sink_positions import NO_POSITION, SinkPosition
from cdc.service.state.skipped_tables import SkippedTables
from sinks.apply.dead_letters import DeadLetter, DeadLetters


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """One change of the key."""

    op: str
    version: str
    commit_lsn: str
    commit_ts: str
    xid: int
    ordinal: int
    schema_id: int
    unchanged: int
    end: Lsn

    @property
    def entry(self) -> str:
        """The log entry that contains the event, by its end. An entry is appended, read and applied as one."""
        return format_lsn(self.end)


@dataclass(frozen=True, slots=True)
class EventOutcome:
    """An event, its outcome by sink (`applied`, `waiting`, `skipped` or `dead letter: <reason>`), and by sink the batch
    that applied it, None if that was not recorded."""

    event: KeyEvent
    entry: str
    sinks: Mapping[str, str]
    batches: Mapping[str, AppliedBatch | None]


@dataclass(frozen=True, slots=True)
class RowHistory:
    """All events of a key, oldest first, and by sink the version stored now."""

    table: str
    events: Sequence[EventOutcome]
    stored: Mapping[str, StoredVersion]


class _SinkHistory:
    """What one sink did with the events of a key."""

    def __init__(self, settings: Settings, sink: str, table: TableId, key: str, position: SinkPosition) -> None:
        self._table = str(table)
        self._reached = position.reached_for((self._table,))
        self._dead_letter = _dead_letter(settings, sink, self._table, key)
        self._skipped = SkippedTables(settings.state, sink).all().get(table)
        self._batches = BatchHistoryReader(settings.state, sink)

    def outcome(self, event: KeyEvent) -> str:
        if self._skipped is not None and self._skipped.dropped(event.end):
            return "skipped"
        if event.end > self._reached:
            return "waiting"
        if self._dead_letter is not None and format_lsn(Lsn(self._dead_letter.version)) == event.version:
            return f"dead letter: {self._dead_letter.reason}"
        return "applied"

    def batch(self, event: KeyEvent) -> AppliedBatch | None:
        return self._batches.batch_of(event.end, self._table) if self.outcome(event) == "applied" else None


def row_history(
    settings: Settings,
    reader: LogReader,
    positions: Mapping[str, SinkPosition],
    table: str,
    key: str,
    *,
    seconds: float,
) -> RowHistory:
    """Every event of a key with its outcome in every sink that receives the table."""
    name, wanted = parsed_table(table), log_key(key)
    sinks = [sink for sink in settings.sinks if not sink.tables or name in sink.tables]
    histories = {
        sink.name: _SinkHistory(settings, sink.name, name, wanted, positions.get(sink.name, NO_POSITION))
        for sink in sinks
    }
    outcomes = []
    for event in events(reader, table, key, seconds):
        by_sink = {sink: history.outcome(event) for sink, history in histories.items()}
        batches = {sink: history.batch(event) for sink, history in histories.items()}
        outcomes.append(EventOutcome(event, event.entry, by_sink, batches))
    return RowHistory(str(name), outcomes, stored_versions(settings, sinks, reader, name, wanted))


def _dead_letter(settings: Settings, sink: str, table: str, key: str) -> DeadLetter | None:
    folder = settings.state / "dead-letters" / sink
    return DeadLetters(folder).of_keys(table, [key]).get(key) if folder.exists() else None


def events(reader: LogReader, table: str, key: str, seconds: float) -> list[KeyEvent]:
    """All events of a key in log order. Raises ConfigError for a bad table or key, MillraceError after `seconds`."""
    name, wanted = str(parsed_table(table)), log_key(key)
    deadline = time.monotonic() + seconds
    found: list[KeyEvent] = []
    for piece in reader.read(reader.start()):
        if time.monotonic() > deadline:
            raise MillraceError(f"The log is too long to search in {seconds:g} s.", "Use: millrace log show")
        rows = piece.rows.filter((pc.field("table") == name) & ((pc.field("key") == wanted) | (pc.field("op") == "p")))
        found += _events([row for row in rows.to_pylist() if row["op"] != "p" or _in_range(row, wanted)], piece.end)
    return found


def _in_range(row: Mapping[str, object], key: str) -> bool:
    """Whether a removed key range contains this key."""
    return bool(KeyRange.parse(str(row["key"])).contains_keys(pa.array([key]))[0])


def _events(rows: Sequence[Mapping[str, object]], end: Lsn) -> Iterator[KeyEvent]:
    for row in rows:
        yield KeyEvent(
            str(row["op"]),
            format_lsn(_lsn(row["version"])),
            format_lsn(_lsn(row["commit_lsn"])),
            str(row["commit_ts"]),
            int(str(row["xid"])),
            int(str(row["ordinal"])),
            int(str(row["schema_id"])),
            len(unchanged) if isinstance(unchanged := row["unchanged"], list) else 0,
            end,
        )


def _lsn(value: object) -> Lsn:
    return Lsn(int(str(value)))


def log_key(text: str) -> str:
    """A key as the log has it: a JSON object without spaces."""
    try:
        key = json.loads(text)
    except ValueError:
        key = None
    if not isinstance(key, dict):
        raise ConfigError('A key is a JSON object of the key columns, for example {"id":42}.')
    return json.dumps(key, separators=(",", ":"), ensure_ascii=False)

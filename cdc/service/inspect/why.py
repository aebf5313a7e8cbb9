"""Why a row is as it is: every event of its key that the log still holds, what became of it in each store and in which
batch, and what each store holds now.

Shows positions, operations, versions and times, never the row's values. The trap: it reads the log from its start, so
it is as slow as the log is long; whoever calls it for a person bounds the time.
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
from cdc.service.inspect.stored_versions import StoredVersion, stored
from cdc.service.state.batch_history import AppliedBatch, BatchHistoryReader
from cdc.service.state.sink_positions import NOWHERE, SinkPosition
from cdc.service.state.skipped_tables import Skipped, SkippedTables
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
        """The entry of the log, by where it ends: what is appended, read and applied as one."""
        return format_lsn(self.end)


@dataclass(frozen=True, slots=True)
class EventOutcome:
    """An event and its fate: by sink, `applied`, `waiting`, `skipped` or `set aside: <reason>`; and the batch that
    applied it, None where that is not recorded."""

    event: KeyEvent
    entry: str
    sinks: Mapping[str, str]
    batches: Mapping[str, AppliedBatch | None]


@dataclass(frozen=True, slots=True)
class RowHistory:
    """The whole way of a key, oldest event first, and where it lies now by sink."""

    table: str
    events: Sequence[EventOutcome]
    stored: Mapping[str, StoredVersion]


def story(
    settings: Settings, reader: LogReader, places: Mapping[str, SinkPosition], table: str, key: str, *, seconds: float
) -> RowHistory:
    """Every event of a key with its fate in every sink that is given its table."""
    name, wanted = _table(table), log_key(key)
    sinks = [sink for sink in settings.sinks if not sink.tables or TableId.parse(name) in sink.tables]
    given = [sink.name for sink in sinks]
    parked = {sink: _letter(settings, sink, name, wanted) for sink in given}
    reached = {sink: places.get(sink, NOWHERE).of((name,)) for sink in given}
    skipped = {sink: SkippedTables(settings.state, sink).all().get(TableId.parse(name)) for sink in given}
    books = {sink: BatchHistoryReader(settings.state, sink) for sink in given}
    told = []
    for event in events(reader, table, key, seconds):
        fates = {sink: _fate(event, reached[sink], parked[sink], skipped[sink]) for sink in given}
        batches = {sink: books[sink].of(event.end, name) if fate == "applied" else None for sink, fate in fates.items()}
        told.append(EventOutcome(event, event.entry, fates, batches))
    return RowHistory(name, told, stored(settings, sinks, reader, TableId.parse(name), wanted))


def _letter(settings: Settings, sink: str, table: str, key: str) -> DeadLetter | None:
    folder = settings.state / "dead-letters" / sink
    return DeadLetters(folder).of_keys(table, [key]).get(key) if folder.exists() else None


def _fate(event: KeyEvent, reached: Lsn, parked: DeadLetter | None, skipped: Skipped | None) -> str:
    if skipped is not None and skipped.passed_over(event.end):
        return "skipped"
    if event.end > reached:
        return "waiting"
    if parked is not None and format_lsn(Lsn(parked.version)) == event.version:
        return f"set aside: {parked.reason}"
    return "applied"


def events(reader: LogReader, table: str, key: str, seconds: float) -> list[KeyEvent]:
    """All events of a key in log order. Raises ConfigError for a malformed question, MillraceError when out of time."""
    name, wanted = _table(table), log_key(key)
    deadline = time.monotonic() + seconds
    found: list[KeyEvent] = []
    for piece in reader.read(reader.start()):
        if time.monotonic() > deadline:
            raise MillraceError(f"The log is too long to search in {seconds:g} s.", "Use: millrace log show")
        rows = piece.rows.filter((pc.field("table") == name) & ((pc.field("key") == wanted) | (pc.field("op") == "p")))
        found += _events([row for row in rows.to_pylist() if row["op"] != "p" or _in_range(row, wanted)], piece.end)
    return found


def _in_range(row: Mapping[str, object], key: str) -> bool:
    """Whether a removed range has this key."""
    return bool(KeyRange.parse(str(row["key"])).holds_keys(pa.array([key]))[0])


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


def _table(text: str) -> str:
    try:
        return str(TableId.parse(text))
    except ValueError as error:
        raise ConfigError(f"{error}.") from None


def log_key(text: str) -> str:
    """A key as the log writes it: a JSON object without spaces."""
    try:
        key = json.loads(text)
    except ValueError:
        key = None
    if not isinstance(key, dict):
        raise ConfigError('A key is a JSON object of the key columns, for instance {"id":42}.')
    return json.dumps(key, separators=(",", ":"), ensure_ascii=False)

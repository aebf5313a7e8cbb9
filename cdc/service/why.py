"""Why a row is as it is: every event of its key that the log still holds.

Shows positions, operations and times, never the row's values. The trap: it reads the log from its start, so it is as
slow as the log is long; whoever calls it for a person bounds the time.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from cdc.errors import ConfigError, MillraceError
from cdc.model import Lsn, TableId, format_lsn
from cdc.ports import LogReader


@dataclass(frozen=True, slots=True)
class Event:
    """One change of the key."""

    op: str
    version: str
    commit_lsn: str
    commit_ts: str
    xid: int
    schema_id: int
    end: Lsn


def events(reader: LogReader, table: str, key: str, seconds: float) -> list[Event]:
    """All events of a key in log order. Raises ConfigError for a malformed question, MillraceError when out of time."""
    name, wanted = _table(table), log_key(key)
    deadline = time.monotonic() + seconds
    found: list[Event] = []
    for piece in reader.read(reader.start()):
        if time.monotonic() > deadline:
            raise MillraceError(f"The log is too long to search in {seconds:g} s.", "Use: millrace log show")
        rows = piece.rows.filter((pc.field("table") == name) & (pc.field("key") == wanted))
        found += _events(rows.to_pylist(), piece.end)
    return found


def _events(rows: Sequence[Mapping[str, object]], end: Lsn) -> Iterator[Event]:
    for row in rows:
        yield Event(
            str(row["op"]),
            format_lsn(_lsn(row["version"])),
            format_lsn(_lsn(row["commit_lsn"])),
            str(row["commit_ts"]),
            int(str(row["xid"])),
            int(str(row["schema_id"])),
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

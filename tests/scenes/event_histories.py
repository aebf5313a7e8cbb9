"""Random events as rows of the log, with late, moved and deleted ones, and a slow, obvious computation of windows."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pyarrow as pa

from cdc.model import LOG_SCHEMA, TICKS_TABLE, Column, PgType, TableId, TableSchema

ORDERS = TableId("public", "orders")
SCHEMA = TableSchema(
    ORDERS,
    (
        Column("id", PgType(20, "int8"), key=True),
        Column("at", PgType(1184, "timestamptz")),
        Column("region", PgType(25, "text")),
        Column("amount", PgType(1700, "numeric"), ((12 << 16) | 2) + 4),
    ),
)
DAY = datetime(2026, 1, 1, tzinfo=UTC)
NEVER, FOREVER = -(10**9), 10**12


@dataclass(frozen=True, slots=True)
class Event:
    """A row: seconds since DAY, or None."""

    id: int
    at: int | None
    region: str | None
    amount: str | None

    def image(self) -> str:
        """As capture writes it."""
        at = None if self.at is None else (DAY + timedelta(seconds=self.at)).isoformat().replace("+00:00", "Z")
        texts = f'"at":{json.dumps(at)},"region":{json.dumps(self.region)}'
        return f'{{"id":{self.id},{texts},"amount":{self.amount or "null"}}}'


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a row by its key; None: deleted. `tick`: the time of a tick instead, in seconds."""

    lsn: int
    id: int = 0
    new: Event | None = None
    tick: int | None = None


def random_changes(rng: random.Random, transactions: int) -> list[Change]:
    """Events around a time that goes on, some early, late, far too late or without a time; updates and deletes."""
    found: list[Change] = []
    alive: set[int] = set()
    now = 0
    for number in range(1, transactions + 1):
        now += rng.choice([0, 5, 10, 20, 60])
        for _ in range(rng.randint(1, 3)):
            key = rng.randint(1, 40)
            if key in alive and rng.random() < 0.25:
                alive.discard(key)
                found.append(Change(number * 10, key))
                continue
            alive.add(key)
            at = rng.choice([now, now - rng.randint(0, 40), now - rng.randint(0, 300), now + rng.randint(0, 30), None])
            amount = rng.choice([None, "1.50", "2.25", "10.00"])
            found.append(Change(number * 10, key, Event(key, at, rng.choice(["n", "s", None]), amount)))
    return found


def log_rows(changes: Sequence[Change]) -> pa.Table:
    """Changes as rows of the log."""
    rows = [_log_row(change, ordinal) for ordinal, change in enumerate(changes)]
    return pa.Table.from_pylist(rows, LOG_SCHEMA)


def _log_row(change: Change, ordinal: int) -> dict[str, object]:
    facts = {"version": change.lsn, "commit_lsn": change.lsn, "ordinal": ordinal, "xid": 1, "schema_id": 1}
    if change.tick is not None:
        moment = DAY + timedelta(seconds=change.tick)
        return {**facts, "table": TICKS_TABLE, "op": "m", "key": '{"id":1}', "after": "{}", "commit_ts": moment}
    op, after = ("d", None) if change.new is None else ("u", change.new.image())
    moment = DAY + timedelta(seconds=change.lsn)
    own = {"table": str(ORDERS), "op": op, "key": f'{{"id":{change.id}}}', "after": after}
    return {**facts, **own, "commit_ts": moment}


def portions(changes: Sequence[Change], rng: random.Random) -> Iterator[list[Change]]:
    """Whole transactions, several at a time."""
    lsns = sorted({change.lsn for change in changes})
    start = 0
    while start < len(lsns):
        end = min(len(lsns), start + rng.randint(1, 6))
        yield [change for change in changes if lsns[start] <= change.lsn <= lsns[end - 1]]
        start = end


Window = tuple[int | None, int]
Windows = Callable[[int], Sequence[Window]]


def tumbling(size: int) -> Windows:
    """One window for each time."""
    return lambda time: [(time // size * size, time // size * size + size)]


def hopping(size: int, every: int) -> Windows:
    """As many as overlap, or none."""

    def windows(time: int) -> Sequence[Window]:
        start, found = time // every * every, []
        while start + size > time:
            found.append((start, start + size))
            start -= every
        return found

    return windows


def itself(time: int) -> Sequence[Window]:
    """The time itself: windows that depend on the rows."""
    return [(time, time)]


def whole_time(time: int) -> Sequence[Window]:
    """One window that never ends."""
    return [(None, FOREVER)]


@dataclass(slots=True)
class Arrivals:
    """Which rows count in which window, one change after the other: the definition, without any state to save."""

    windows: Windows
    lateness: int
    grace: int
    greatest: int = NEVER
    dropped: int = 0
    counted: dict[tuple[int, Window], tuple[Event, bool]] = field(default_factory=dict)
    """By row and window: the row, and whether it came late."""
    rows: dict[int, Event] = field(default_factory=dict)

    def take(self, changes: Sequence[Change]) -> None:
        """Whole transactions: the clock that decides is that before the transaction."""
        for lsn in sorted({change.lsn for change in changes}):
            before = self.greatest
            for change in changes:
                if change.lsn == lsn:
                    self._take(change, before)

    def _take(self, change: Change, clock: int) -> None:
        old = self.rows.pop(change.id, None)
        for window in self._of(old):
            if self._open(window, clock):
                self.counted.pop((change.id, window), None)
        if change.new is None:
            return
        self.rows[change.id] = change.new
        for window in self._of(change.new):
            if self._open(window, clock):
                self.counted[change.id, window] = (change.new, window[1] <= clock - self.lateness)
            else:
                self.dropped += 1
        self.greatest = max(self.greatest, NEVER if change.new.at is None else change.new.at)

    def _of(self, row: Event | None) -> Sequence[Window]:
        return () if row is None or row.at is None else self.windows(row.at)

    def _open(self, window: Window, clock: int) -> bool:
        return window[1] + self.grace > clock - self.lateness

    @property
    def watermark(self) -> int:
        """Windows that end up to here have closed."""
        return self.greatest - self.lateness


Result = dict[tuple[object, ...], tuple[object, ...]]
"""By key: the window's end, and count, sum, maximum and late rows."""


def grouped(arrivals: Arrivals) -> Result:
    """One row per window and region."""
    groups: dict[tuple[Window, str | None], list[tuple[Event, bool]]] = {}
    for (_, window), counted in arrivals.counted.items():
        groups.setdefault((window, counted[0].region), []).append(counted)
    found: Result = {}
    for (window, region), rows in groups.items():
        found[(region,) if window[0] is None else (window[0], region)] = (window[1], *_reduced(rows))
    return found


def sessions(arrivals: Arrivals, gap: int) -> Result:
    """One row per session and region."""
    found: Result = {}
    for region in {row.region for row, _ in arrivals.counted.values()}:
        rows = [counted for counted in arrivals.counted.values() if counted[0].region == region]
        session: list[tuple[Event, bool]] = []
        for counted in sorted(rows, key=lambda counted: _time(counted[0])):
            if session and _time(counted[0]) - _time(session[-1][0]) >= gap:
                found[_time(session[0][0]), region] = (_time(session[-1][0]) + gap, *_reduced(session))
                session = []
            session.append(counted)
        found[_time(session[0][0]), region] = (_time(session[-1][0]) + gap, *_reduced(session))
    return found


def sliding(arrivals: Arrivals, size: int) -> Result:
    """One row per row and time: those of its region in the time before it."""
    found: Result = {}
    for (key, window), (row, _) in arrivals.counted.items():
        near = [
            other
            for other in arrivals.counted.values()
            if other[0].region == row.region and _time(row) - size < _time(other[0]) <= _time(row)
        ]
        found[window[1], key] = (window[1], *_reduced(near))
    return found


def _time(row: Event) -> int:
    assert row.at is not None
    return row.at


def _reduced(rows: Sequence[tuple[Event, bool]]) -> tuple[object, ...]:
    amounts = [Decimal(row.amount) for row, _ in rows if row.amount is not None]
    return len(rows), sum(amounts) if amounts else None, max(amounts, default=None), sum(late for _, late in rows)


def shown(row: Mapping[str, object], key: Sequence[str]) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """A row of the view in the form of `Result`."""
    times = {name: _seconds(row.get(name)) for name in ("window_start", "window_end")}
    values = {**row, **times}
    amounts = [None if row[name] is None else Decimal(str(row[name])) for name in ("total", "largest")]
    end = FOREVER if times["window_end"] is None else times["window_end"]
    return tuple(values[name] for name in key), (end, row["orders"], *amounts, row["late"])


def _seconds(text: object) -> int | None:
    return None if text is None else int((datetime.fromisoformat(str(text)) - DAY).total_seconds())

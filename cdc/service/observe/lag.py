"""How far behind each store is, in bytes of WAL and in seconds: pure, fed with what the parts said.

Promise: a lag grows while nothing moves, whatever it is that stands still. Where the reader itself is silent or behind,
nobody knows what the source did meanwhile, so every store and table is at least as far behind as the reader.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cdc.model import ZERO_LSN, Lsn
from cdc.service.observe.health import SILENT_AFTER, has_reached, nested
from cdc.service.state.sink_positions import SinkPosition
from cdc.service.state.status import Facts, age

_LONGEST_TRAIL = 1000


@dataclass(slots=True)
class Trail:
    """Where something was, and when that was committed, oldest first. Thinned where it gets long: a store that is hours
    behind need not be measured to the second."""

    _lsns: list[Lsn] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)

    def add(self, lsn: Lsn, at: float) -> None:
        """It moved there; what is not ahead of where it was is passed over."""
        if self._lsns and lsn <= self._lsns[-1]:
            return
        self._lsns.append(lsn)
        self._times.append(at)
        if len(self._lsns) > _LONGEST_TRAIL:
            del self._lsns[1:-1:2], self._times[1:-1:2]

    def after(self, reached: Lsn) -> int:
        """Bytes between a position and where it is. A store with nothing yet lacks what came since it was first seen:
        counted from 0, it would be all the WAL that the server ever wrote."""
        return self._lsns[-1] - (reached or self._lsns[0]) if self._lsns else 0

    def beyond(self, reached: Lsn) -> float | None:
        """When the oldest place beyond a position was committed; None if there is none."""
        at = bisect_right(self._lsns, reached)
        return self._times[at] if at < len(self._lsns) else None

    def forget(self, reached: Lsn) -> None:
        """Everybody is there: only the newest place is still of interest."""
        keep = min(bisect_right(self._lsns, reached), max(0, len(self._lsns) - 1))
        del self._lsns[:keep], self._times[:keep]


@dataclass(frozen=True, slots=True)
class SinkLag:
    """Bytes of WAL between the newest known change and what is applied; seconds since that change was committed."""

    bytes: int = 0
    seconds: float = 0.0


NO_LAG = SinkLag()


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything that lags are judged by, at one time. `sinks` maps each sink to the tables that it is given, `places`
    tells how far each table is where some are held back."""

    now: float
    capture: Facts
    head: Lsn
    reached: Mapping[str, Lsn]
    sinks: Mapping[str, Sequence[str]]
    places: Mapping[str, SinkPosition] = field(default_factory=dict)

    def table_reached(self, sink: str, table: str) -> Lsn:
        """How far one table is in a sink: a table that is held back says nothing of the others."""
        return self.places[sink].of((table,)) if sink in self.places else self.reached[sink]


@dataclass(slots=True)
class Lags:
    """The lags of the last moment. Look about once a second: a lag may be too small by the time between two looks."""

    capture: SinkLag = NO_LAG
    sinks: Mapping[str, SinkLag] = field(default_factory=dict)
    tables: Mapping[tuple[str, str], SinkLag] = field(default_factory=dict)
    _current_at: float = 0.0
    _head: Trail = field(default_factory=Trail)
    _tables: dict[str, Trail] = field(default_factory=dict)
    _last_commit: float = 0.0

    def look(self, moment: Moment) -> None:
        """Judge one moment."""
        self.capture = self._of_reader(moment)
        self._note(moment)
        self.sinks = {name: self._of(moment, at, self._head) for name, at in moment.reached.items()}
        self.tables = {
            (sink, table): self._of_table(moment, sink, table)
            for sink, tables in moment.sinks.items()
            for table in tables
            if sink in moment.reached
        }

    def _note(self, moment: Moment) -> None:
        committed = _last(moment)
        moved = committed != self._last_commit  # else it is an entry without rows, which is as old as this look
        self._head.add(moment.head, committed if moved else moment.now)
        self._last_commit = committed
        for table, (lsn, at) in _newest(moment).items():
            self._tables.setdefault(table, Trail()).add(Lsn(lsn + 1), at)
        lowest = min(moment.reached.values(), default=ZERO_LSN)
        for trail in (self._head, *self._tables.values()):
            trail.forget(lowest)

    def _of_reader(self, moment: Moment) -> SinkLag:
        source, watermark = _lsn(moment.capture.get("source_lsn")), _lsn(moment.capture.get("watermark"))
        now = datetime.fromtimestamp(moment.now, UTC)
        heard = age(moment.capture, now) <= SILENT_AFTER and moment.capture.get("state") == "streaming"
        if heard and has_reached(source, watermark, watermark, watermark):
            self._current_at = moment.now
            return NO_LAG
        self._current_at = self._current_at or _seconds(moment.capture.get("looked_at"), moment.now)
        return SinkLag(max(0, source - watermark), max(0.0, moment.now - self._current_at))

    def _of_table(self, moment: Moment, sink: str, table: str) -> SinkLag:
        """A table of which nothing was heard yet may be among what the store lacks."""
        reached = moment.table_reached(sink, table)
        return self._of(moment, reached, self._tables.get(table, self._head))

    def _of(self, moment: Moment, reached: Lsn, trail: Trail) -> SinkLag:
        since = trail.beyond(reached)
        if since is None:
            return self.capture
        return SinkLag(trail.after(reached), max(moment.now - since, self.capture.seconds))


def _newest(moment: Moment) -> dict[str, tuple[Lsn, float]]:
    found = ((table, nested(moment.capture, "tables", table)) for table in nested(moment.capture, "tables"))
    return {table: (_lsn(facts.get("lsn")), _seconds(facts.get("at"), moment.now)) for table, facts in found}


def _last(moment: Moment) -> float:
    return _seconds(moment.capture.get("last_commit_at"), moment.now)


def _lsn(value: object) -> Lsn:
    return Lsn(value) if isinstance(value, int) else ZERO_LSN


def _seconds(value: object, otherwise: float) -> float:
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return otherwise

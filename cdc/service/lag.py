"""How far behind each store is, in bytes of WAL and in seconds: pure, fed with what the parts said.

Promise: a lag grows while nothing moves, whatever it is that stands still. Where the reader itself is silent or behind,
nobody knows what the source did meanwhile, so every store and table is at least as far behind as the reader.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cdc.model import ZERO_LSN, Lsn
from cdc.service.health import SILENT_AFTER, has_reached, nested
from cdc.service.status import Facts, age

Waiting = tuple[Lsn, float]
"""A position that a store does not hold yet, and when it was committed."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Bytes of WAL between the newest known change and what is applied; seconds since that change was committed."""

    bytes: int = 0
    seconds: float = 0.0


NO_LAG = Lag()


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything that lags are judged by, at one time. `sinks` maps each sink to the tables that it is given."""

    now: float
    capture: Facts
    head: Lsn
    reached: Mapping[str, Lsn]
    sinks: Mapping[str, Sequence[str]]


@dataclass(slots=True)
class Lags:
    """The lags of the last moment. Look about once a second: a lag may be too small by the time between two looks."""

    capture: Lag = NO_LAG
    sinks: Mapping[str, Lag] = field(default_factory=dict)
    tables: Mapping[tuple[str, str], Lag] = field(default_factory=dict)
    _current_at: float = 0.0
    _newest: dict[str, Waiting] = field(default_factory=dict)
    _waiting: dict[tuple[str, str], Waiting] = field(default_factory=dict)

    def look(self, moment: Moment) -> None:
        """Judge one moment."""
        self.capture = self._of_reader(moment)
        self._newest |= _newest(moment)  # a reader that was started again has forgotten
        self.sinks = {name: self._of(moment, name, "", moment.head, _last(moment)) for name in moment.reached}
        self.tables = {
            (sink, table): self._of_table(moment, sink, table)
            for sink, tables in moment.sinks.items()
            for table in tables
            if sink in moment.reached
        }
        self._waiting = {place: since for place, since in self._waiting.items() if _known(place, self)}

    def _of_reader(self, moment: Moment) -> Lag:
        source, watermark = _lsn(moment.capture.get("source_lsn")), _lsn(moment.capture.get("watermark"))
        now = datetime.fromtimestamp(moment.now, UTC)
        heard = age(moment.capture, now) <= SILENT_AFTER and moment.capture.get("state") == "streaming"
        if heard and has_reached(source, watermark, watermark, watermark):
            self._current_at = moment.now
            return Lag()
        since = self._current_at or _seconds(moment.capture.get("looked_at"), moment.now)
        self._current_at = self._current_at or since
        return Lag(max(0, source - watermark), max(0.0, moment.now - since))

    def _of_table(self, moment: Moment, sink: str, table: str) -> Lag:
        if table not in self._newest:
            return self.sinks[sink]  # it may be among what the store lacks
        committed, at = self._newest[table]
        return self._of(moment, sink, table, Lsn(committed + 1), at)

    def _of(self, moment: Moment, sink: str, table: str, wanted: Lsn, committed: float) -> Lag:
        """`wanted` is what the store must reach; until it does, the oldest such position seen is what counts."""
        reached, place = moment.reached[sink], (sink, table)
        first, since = self._waiting.get(place, (ZERO_LSN, 0.0))
        if reached >= first:
            self._waiting.pop(place, None)
        if reached >= wanted:
            return self.capture
        if place not in self._waiting:
            self._waiting[place] = (wanted, min(committed, moment.now))
        since = self._waiting[place][1]
        behind = max(wanted, _lsn(moment.capture.get("source_lsn"))) if not table else wanted
        return Lag(behind - reached, max(moment.now - since, self.capture.seconds))


def _known(place: tuple[str, str], lags: Lags) -> bool:
    sink, table = place
    return place in lags.tables if table else sink in lags.sinks


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

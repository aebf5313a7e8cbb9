"""The lag of each sink, in bytes of WAL and in seconds. Pure: computed from what capture and apply report.

Promise: a lag grows while nothing moves, whichever part has stopped. While capture is silent or behind, new changes of
the source are unknown, so every sink and table lags at least as much as capture.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cdc.config.settings import VIEW_SCHEMA
from cdc.model import ZERO_LSN, Lsn
from cdc.service.observe.health import has_reached, nested
from cdc.service.state.sink_positions import SinkPosition
from cdc.service.state.status import SILENT_AFTER, Facts, age

_LONGEST_HISTORY = 1000


@dataclass(slots=True)
class PositionHistory:
    """Past positions with their commit times, oldest first. A long history is thinned out: the lag of a sink that is
    hours behind need not be exact to the second."""

    _lsns: list[Lsn] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)

    def add(self, lsn: Lsn, at: float) -> None:
        """Add a position; ignored unless it is beyond the last one."""
        if self._lsns and lsn <= self._lsns[-1]:
            return
        self._lsns.append(lsn)
        self._times.append(at)
        if len(self._lsns) > _LONGEST_HISTORY:
            del self._lsns[1:-1:2], self._times[1:-1:2]

    def bytes_after(self, reached: Lsn) -> int:
        """Bytes from a position to the newest one. For a sink without a position they count from the oldest one here:
        counted from 0, they would be all the WAL that the server ever wrote."""
        return self._lsns[-1] - (reached or self._lsns[0]) if self._lsns else 0

    def first_commit_after(self, reached: Lsn) -> float | None:
        """The commit time of the oldest position beyond this one; None if there is none."""
        at = bisect_right(self._lsns, reached)
        return self._times[at] if at < len(self._lsns) else None

    def forget(self, reached: Lsn) -> None:
        """Drop what every sink has reached, except the newest position."""
        keep = min(bisect_right(self._lsns, reached), max(0, len(self._lsns) - 1))
        del self._lsns[:keep], self._times[:keep]


@dataclass(frozen=True, slots=True)
class SinkLag:
    """Bytes of WAL from the applied position to the newest known change; age of the oldest change not applied."""

    bytes: int = 0
    seconds: float = 0.0


NO_LAG = SinkLag()


@dataclass(frozen=True, slots=True)
class LagInputs:
    """What lags are computed from, at one time. `sinks` maps each sink to its tables; `positions` has the positions of
    held-back tables."""

    now: float
    capture: Facts
    head: Lsn
    reached: Mapping[str, Lsn]
    sinks: Mapping[str, Sequence[str]]
    positions: Mapping[str, SinkPosition] = field(default_factory=dict)
    views: Mapping[str, Lsn] = field(default_factory=dict)
    """By view: the LSN that its rows in the log reflect."""

    def table_reached(self, sink: str, table: str) -> Lsn:
        """The LSN up to which a sink has one table: another table that is held back does not count."""
        return self.positions[sink].reached_for((table,)) if sink in self.positions else self.reached[sink]


@dataclass(slots=True)
class Lags:
    """The present lags. Update them about once a second: a lag may be too small by the time between two updates."""

    capture: SinkLag = NO_LAG
    sinks: Mapping[str, SinkLag] = field(default_factory=dict)
    tables: Mapping[tuple[str, str], SinkLag] = field(default_factory=dict)
    views: Mapping[str, SinkLag] = field(default_factory=dict)
    _current_at: float = 0.0
    _head: PositionHistory = field(default_factory=PositionHistory)
    _tables: dict[str, PositionHistory] = field(default_factory=dict)
    _last_commit: float = 0.0

    def update(self, inputs: LagInputs) -> None:
        """Compute the lags at one time."""
        self.capture = self._of_capture(inputs)
        self._record(inputs)
        self.sinks = {name: self._of(inputs, at, self._head) for name, at in inputs.reached.items()}
        self.views = {name: self._of(inputs, at, self._head) for name, at in inputs.views.items()}
        self.tables = {
            (sink, table): self._of_table(inputs, sink, table)
            for sink, tables in inputs.sinks.items()
            for table in tables
            if sink in inputs.reached
        }

    def _record(self, inputs: LagInputs) -> None:
        committed = _seconds(inputs.capture.get("last_commit_at"), inputs.now)
        moved = committed != self._last_commit  # else the head is an entry without rows, which is new
        self._head.add(inputs.head, committed if moved else inputs.now)
        self._last_commit = committed
        for table, (lsn, at) in _newest(inputs).items():
            self._tables.setdefault(table, PositionHistory()).add(Lsn(lsn + 1), at)
        lowest = min([*inputs.reached.values(), *inputs.views.values()], default=ZERO_LSN)
        for history in (self._head, *self._tables.values()):
            history.forget(lowest)

    def _of_capture(self, inputs: LagInputs) -> SinkLag:
        source, watermark = _lsn(inputs.capture.get("source_lsn")), _lsn(inputs.capture.get("watermark"))
        now = datetime.fromtimestamp(inputs.now, UTC)
        streaming = age(inputs.capture, now) <= SILENT_AFTER and inputs.capture.get("state") == "streaming"
        if streaming and has_reached(source, watermark, watermark, watermark):
            self._current_at = inputs.now
            return NO_LAG
        self._current_at = self._current_at or _seconds(inputs.capture.get("looked_at"), inputs.now)
        return SinkLag(max(0, source - watermark), max(0.0, inputs.now - self._current_at))

    def _of_table(self, inputs: LagInputs, sink: str, table: str) -> SinkLag:
        """A table whose changes capture has not reported yet counts with the head: the sink may lack some of it. That
        of a view is at least as far behind as the view."""
        reached = inputs.table_reached(sink, table)
        own = self._of(inputs, reached, self._tables.get(table, self._head))
        view = self.views.get(table.removeprefix(f"{VIEW_SCHEMA}."), NO_LAG) if inputs.views else NO_LAG
        return SinkLag(max(own.bytes, view.bytes), max(own.seconds, view.seconds))

    def _of(self, inputs: LagInputs, reached: Lsn, history: PositionHistory) -> SinkLag:
        since = history.first_commit_after(reached)
        if since is None:
            return self.capture
        return SinkLag(history.bytes_after(reached), max(inputs.now - since, self.capture.seconds))


def _newest(inputs: LagInputs) -> dict[str, tuple[Lsn, float]]:
    found = ((table, nested(inputs.capture, "tables", table)) for table in nested(inputs.capture, "tables"))
    return {table: (_lsn(facts.get("lsn")), _seconds(facts.get("at"), inputs.now)) for table, facts in found}


def _lsn(value: object) -> Lsn:
    return Lsn(value) if isinstance(value, int) else ZERO_LSN


def _seconds(value: object, otherwise: float) -> float:
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return otherwise

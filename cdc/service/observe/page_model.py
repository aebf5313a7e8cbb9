"""What the page shows, made from an observation. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cdc.model import format_lsn
from cdc.service.observe.health import nested
from cdc.service.observe.lag import NO_LAG
from cdc.service.observe.observer import Observation


@dataclass(frozen=True, slots=True)
class SlotView:
    """The replication slot. `room` is None if no limit is known, `seconds_to_full` if the limit is not near."""

    bytes: int
    status: str
    room: int | None
    seconds_to_full: int | None


@dataclass(frozen=True, slots=True)
class SinkView:
    """One sink. `held` are its paused tables."""

    name: str
    state: str
    message: str
    reached: str
    lag_bytes: int
    lag_seconds: float
    changes: int
    batch_ms: int
    dead_letters: int
    held: tuple[str, ...]
    waiting: Mapping[str, object]
    skipped: tuple[str, ...]
    lost: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class DerivedView:
    """One view of the pipeline file. `lsn` is what its rows in the log reflect."""

    name: str
    kind: str
    state: str
    message: str
    lsn: str
    lag_bytes: int
    lag_seconds: float
    rows: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class TableView:
    """One table: changes captured by operation, changes applied by sink, and lag by sink."""

    captured: Mapping[str, int]
    applied: Mapping[str, int]
    lag_seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PageModel:
    """Source, log and sinks. `queued_bytes` is what capture has read and not yet appended to the log. `waiting` are the
    tables that capture does not follow now, each with message and remedy; a sink's are those that its store cannot take
    now."""

    capture: str
    trouble: str
    captured: int
    per_second: float
    queued_bytes: int
    slot: SlotView
    head: str
    disk_free: int
    disk_seconds_to_full: int | None
    snapshot: Mapping[str, object]
    backfills: tuple[Mapping[str, object], ...]
    waiting: Mapping[str, object]
    sinks: tuple[SinkView, ...]
    tables: Mapping[str, TableView]
    views: tuple[DerivedView, ...] = ()


def page_model(seen: Observation) -> PageModel:
    """The page's content at one time."""
    capture = seen.capture
    backfills = capture.get("backfills")
    return PageModel(
        str(capture.get("state", "not running")),
        str(capture.get("trouble") or ""),
        count(capture.get("changes_total")),
        _rate(capture.get("changes_per_second")),
        count(capture.get("queued_bytes")),
        _slot(seen),
        format_lsn(seen.head),
        seen.disk_free,
        _finite(seen.disk_seconds),
        nested(capture, "snapshot"),
        tuple(item for item in backfills if isinstance(item, Mapping)) if isinstance(backfills, list) else (),
        nested(capture, "tables_waiting"),
        tuple(_sink(seen, name) for name in seen.positions),
        _tables(seen),
        tuple(_view(seen, name) for name in seen.view_reached),
    )


def _view(seen: Observation, name: str) -> DerivedView:
    facts, lag = nested(seen.views, "views", name), seen.view_lags.get(name, NO_LAG)
    return DerivedView(
        name,
        str(facts.get("kind", "")),
        str(facts.get("state", "not running")),
        str(nested(facts, "error").get("message") or facts.get("message") or ""),
        format_lsn(seen.view_reached[name]),
        lag.bytes,
        round(lag.seconds, 1),
        count(facts.get("rows")),
        count(facts.get("state_bytes")),
    )


def _slot(seen: Observation) -> SlotView:
    retained, state = seen.capture.get("slot_retained_bytes"), seen.capture.get("slot_wal_status")
    return SlotView(count(retained), str(state or ""), seen.slot_room, _finite(seen.slot_seconds))


def _sink(seen: Observation, name: str) -> SinkView:
    facts, lag = nested(seen.apply, "sinks", name), seen.sink_lags.get(name, NO_LAG)
    return SinkView(
        name,
        str(facts.get("state", "not running")),
        str(facts.get("error") or ""),
        format_lsn(seen.positions[name].reached),
        lag.bytes,
        round(lag.seconds, 1),
        sum(count(value) for value in nested(facts, "changes").values()),
        count(facts.get("batch_ms")),
        count(facts.get("dead_letters")),
        _names(facts.get("held")),
        nested(facts, "tables_waiting"),
        _names(facts.get("tables_skipped")),
        nested(facts, "losses"),
    )


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _tables(seen: Observation) -> dict[str, TableView]:
    sinks = tuple(seen.positions)
    names = {table for name in sinks for table in nested(seen.apply, "sinks", name, "changes")}
    names |= set(nested(seen.capture, "changes")) | {table for _, table in seen.table_lags}
    return {table: _table(seen, table, sinks) for table in sorted(names)}


def _table(seen: Observation, table: str, sinks: tuple[str, ...]) -> TableView:
    applied = {name: nested(seen.apply, "sinks", name, "changes").get(table) for name in sinks}
    lags = {name: seen.table_lags.get((name, table), NO_LAG).seconds for name in sinks}
    return TableView(
        {op: count(value) for op, value in nested(seen.capture, "changes", table).items()},
        {name: count(value) for name, value in applied.items()},
        {name: round(seconds, 1) for name, seconds in lags.items()},
    )


def _finite(seconds: float) -> int | None:
    return None if math.isinf(seconds) else int(seconds)


def _rate(value: object) -> float:
    return value if isinstance(value, (int, float)) else 0.0


def count(value: object) -> int:
    """A number from a status file; anything else is 0."""
    return value if isinstance(value, int) else 0

"""The pipeline as one picture: what the page shows, from what the parts said. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from cdc.model import Lsn, format_lsn
from cdc.service.health import nested
from cdc.service.status import Facts


@dataclass(frozen=True, slots=True)
class SinkFlow:
    """One store."""

    name: str
    state: str
    lag_bytes: int
    changes: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class Flow:
    """Source, log, stores; `tables` has the changes applied by table and sink."""

    capture: str
    slot_bytes: int
    captured: int
    head: str
    sinks: tuple[SinkFlow, ...]
    tables: Mapping[str, Mapping[str, int]]


def flow(capture: Facts, apply: Facts, reached: Mapping[str, Lsn], head: Lsn) -> Flow:
    """The picture of one moment."""
    return Flow(
        str(capture.get("state", "not running")),
        count(capture.get("slot_retained_bytes")),
        count(capture.get("changes_total")),
        format_lsn(head),
        tuple(_sink(name, nested(apply, "sinks", name), lsn, head) for name, lsn in reached.items()),
        _tables(apply, reached),
    )


def _sink(name: str, facts: Facts, reached: Lsn, head: Lsn) -> SinkFlow:
    changes = sum(count(value) for value in nested(facts, "changes").values())
    state = str(facts.get("state", "not running"))
    return SinkFlow(name, state, max(0, head - reached), changes, count(facts.get("dead_letters")))


def _tables(apply: Facts, sinks: Mapping[str, Lsn]) -> dict[str, dict[str, int]]:
    tables: dict[str, dict[str, int]] = {}
    for name in sinks:
        for table, changes in nested(apply, "sinks", name, "changes").items():
            tables.setdefault(table, {})[name] = count(changes)
    return tables


def count(value: object) -> int:
    """A number from a status file; anything else is 0."""
    return value if isinstance(value, int) else 0

"""Which sinks and tables a user has paused or skipped: one small file that outlives every process.

A paused sink stops after its batch and resumes later from its own position. A paused table is held back from every
sink; once resumed, its changes are applied in order. A skipped table is dropped by one sink: its changes are not kept,
and a backfill fills it again when it is resumed (`apply.held_back_tables` does both). Capture continues in either case:
pending changes stay in the log, and the replication slot keeps advancing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cdc import durable_files
from cdc.config.settings import Settings
from cdc.errors import ConfigError, EnvironmentFault
from cdc.model import TableId
from views.dropped import restore

_FILE = "paused.json"


@dataclass(frozen=True, slots=True)
class Paused:
    """What is paused and skipped. Tables as `schema.name`; `skipped` has them by sink."""

    sinks: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()
    skipped: Mapping[str, frozenset[str]] = field(default_factory=dict)
    resumed: int = field(default=0, compare=False)
    """Number of resume requests so far. When it grows, sinks retry their waiting tables at once."""

    def facts(self) -> dict[str, object]:
        """For JSON."""
        skipped = {sink: sorted(tables) for sink, tables in sorted(self.skipped.items())}
        return {"sinks": sorted(self.sinks), "tables": sorted(self.tables), "skipped": skipped}

    def with_skipped(self, sink: str, tables: frozenset[str]) -> "Paused":
        """A copy in which the sink skips these tables."""
        others = {name: skipped for name, skipped in self.skipped.items() if name != sink}
        return replace(self, skipped={**others, sink: tables} if tables else others)


def read(state: Path) -> Paused:
    """What is paused now. Raises EnvironmentFault if the file is unreadable: a guess could apply a paused table."""
    try:
        facts = json.loads((state / _FILE).read_text(encoding="utf-8"))
        skipped = {str(sink): frozenset(map(str, tables)) for sink, tables in facts.get("skipped", {}).items()}
        tables = frozenset(map(str, facts["tables"]))
        return Paused(frozenset(map(str, facts["sinks"])), tables, skipped, int(facts.get("resumed", 0)))
    except FileNotFoundError:
        return Paused()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise EnvironmentFault(
            f"{state / _FILE} is not readable.", "Remove it, then pause sinks and tables again as needed."
        ) from None


def pause(settings: Settings, target: str) -> Paused:
    """Pause a sink or a table. Raises ConfigError for a name that the pipeline does not have."""
    now = read(settings.state)
    if target in _sinks(settings, now):
        return _write(settings, replace(now, sinks=now.sinks | {target}))
    return _write(settings, replace(now, tables=now.tables | {_table(settings, target, now)}))


def skip(settings: Settings, table: str, sink: str) -> Paused:
    """Have one sink skip a table. Raises ConfigError for a name that the sink does not have."""
    now = read(settings.state)
    settings_of_sink = next((one for one in settings.sinks if one.name == sink), None)
    if settings_of_sink is None:
        raise ConfigError(f"No sink is called {sink}.", f"Sinks: {', '.join(one.name for one in settings.sinks)}.")
    name, known = _table(settings, table, now), {str(one) for one in settings.tables_of(settings_of_sink)}
    if name not in known:
        raise ConfigError(f"Sink {sink} has no table {name}.", f"Its tables: {', '.join(sorted(known)) or 'none'}.")
    return _write(settings, now.with_skipped(sink, now.skipped.get(sink, frozenset()) | {name}))


def resume(settings: Settings, target: str, sink: str = "") -> Paused:
    """Resume a sink, or a table that is paused, skipped or waiting; with `sink`, only there. A view that has failed is
    tried again, one that was dropped begins again.

    A name that has left the pipeline can still be resumed.
    """
    now = replace(read(settings.state), resumed=read(settings.state).resumed + 1)
    if not sink and target in _sinks(settings, now):
        return _write(settings, replace(now, sinks=now.sinks - {target}))
    if sink and sink not in _sinks(settings, now):
        raise ConfigError(f"No sink is called {sink}.", f"Sinks: {', '.join(one.name for one in settings.sinks)}.")
    table = _table(settings, target, now)
    for view in settings.views:
        if str(view.table) == table and not sink:
            restore(settings.state, view.name)
    for name in (sink,) if sink else tuple(now.skipped):
        now = now.with_skipped(name, now.skipped.get(name, frozenset()) - {table})
    return _write(settings, now if sink else replace(now, tables=now.tables - {table}))


def _sinks(settings: Settings, now: Paused) -> set[str]:
    return {sink.name for sink in settings.sinks} | now.sinks | now.skipped.keys()


def _table(settings: Settings, target: str, now: Paused) -> str:
    known = set(map(str, settings.tables))
    try:
        name = str(TableId.parse(target))
    except ValueError:
        name = target
    if name not in known.union(now.tables, *now.skipped.values()):
        raise ConfigError(
            f"{target!r} is neither a sink nor a table of this pipeline.",
            f"Sinks: {', '.join(sink.name for sink in settings.sinks) or 'none'}. "
            f"Tables: {', '.join(sorted(known)) or 'none'}.",
        )
    return name


def _write(settings: Settings, paused: Paused) -> Paused:
    path = settings.state / _FILE
    try:
        settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable_files.replace(path, json.dumps({**paused.facts(), "resumed": paused.resumed}).encode())
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}.", "Nothing was changed.") from None
    return paused

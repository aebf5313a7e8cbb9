"""Which parts a changed pipeline file concerns, and how a reload is requested. The plan is pure.

A part is restarted only if it must be: apply adds, removes and changes single sinks while it runs, capture single
tables, and views single views. A change that would lose the log's position is refused as a whole.
"""

import fcntl
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cdc.config.settings import Section, Settings, SourceSettings
from cdc.errors import ConfigError, EnvironmentFault
from cdc.service.standby.lease import current, here

_FIXED = ("slot", "publication", "database")
"""Settings of the source: if one of them changed, the log's position would be meaningless."""

_LOG = ("kind", "uri")
"""Settings of the log: with another value it would be another log."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a changed file requires: parts to restart, parts that reload the file, and a text for each change."""

    restart: frozenset[str] = frozenset()
    reload: frozenset[str] = frozenset()
    changes: tuple[str, ...] = ()


def plan(before: Settings, after: Settings) -> Plan:
    """Compare two valid files. Raises ConfigError for what cannot change while the pipeline runs."""
    _refuse(before, after)
    restart: set[str] = set()
    reload: set[str] = set()
    changes = [*_tables(before, after), *_views(before, after), *_sinks(before, after)]
    if before.sinks != after.sinks:
        reload.add("apply")
    if before.views != after.views:
        reload |= {"apply", "views"}
    if before.source.tables != after.source.tables:
        reload |= {"capture", "apply", "views"}
    for section, parts in (("log", {"capture", "apply", "views"}), ("spark", {"apply"}), ("budgets", {"capture"})):
        if named := _changed_fields(section, getattr(before, section), getattr(after, section)):
            changes += named
            restart |= parts
    if before.http != after.http:
        changes += _changed_fields("http", before.http, after.http)
    if _connection(before.source) != _connection(after.source):
        changes += _changed_fields("source", before.source, after.source, skip=("tables",))
        restart |= {"capture", "apply", "views"}
    if not after.views:
        restart, reload = restart - {"views"}, reload - {"views"}
    return Plan(frozenset(restart), frozenset(reload - restart), tuple(changes))


def _refuse(before: Settings, after: Settings) -> None:
    found = [name for name in ("state",) if before.state != after.state]
    found += [f"source.{name}" for name in _FIXED if getattr(before.source, name) != getattr(after.source, name)]
    found += [f"log.{name}" for name in _LOG if getattr(before.log, name, "") != getattr(after.log, name, "")]
    kept = {table.name: table for table in before.source.tables}
    found += [f"{table.name}" for table in after.source.tables if kept.get(table.name, table) != table]
    if found:
        raise ConfigError(
            f"{', '.join(found)} cannot change while the pipeline runs.",
            "Undo that, or restart the pipeline; it then says what happens to its position.",
        )


def _tables(before: Settings, after: Settings) -> list[str]:
    old = {table.name: table for table in before.source.tables}
    new = {table.name: table for table in after.source.tables}
    return _differences("table", {str(k): v for k, v in old.items()}, {str(k): v for k, v in new.items()})


def _sinks(before: Settings, after: Settings) -> list[str]:
    found = _differences("sink", {sink.name: sink for sink in before.sinks}, {sink.name: sink for sink in after.sinks})
    release = "(the log keeps its position; release it with: millrace log forget)"
    return [f"{change} {release}" if change.endswith(" removed") else change for change in found]


def _views(before: Settings, after: Settings) -> list[str]:
    old, new = ({view.name: view for view in settings.views} for settings in (before, after))
    rows = "(its rows stay in the stores; remove them with: millrace view drop)"
    return [f"{line} {rows}" if line.endswith(" removed") else line for line in _differences("view", old, new)]


def _differences(kind: str, old: Mapping[str, Section], new: Mapping[str, Section]) -> list[str]:
    return [
        *(f"{kind} {name} added" for name in new if name not in old),
        *(f"{kind} {name} removed" for name in old if name not in new),
        *(f"{kind} {name} changed" for name in new if name in old and old[name] != new[name]),
    ]


def _connection(source: SourceSettings) -> SourceSettings:
    return source.model_copy(update={"tables": ()})


def _changed_fields(section: str, before: Section, after: Section, skip: tuple[str, ...] = ()) -> list[str]:
    names = type(after).model_fields
    return [
        f"{section}.{name} changed"
        for name in names
        if name not in skip and getattr(before, name, None) != getattr(after, name)
    ]


def request(state: Path) -> int:
    """Have the running daemon reload its file; returns its pid. Raises EnvironmentFault if none runs."""
    pid = daemon_pid(state)
    if pid is None:
        raise EnvironmentFault(f"No millrace runs on the state folder {state}.", "Start it: millrace run")
    active = current(state)
    if active is not None and active.holder.place != here().place:
        raise EnvironmentFault(
            f"The active millrace of the state folder {state} runs elsewhere: {active.holder}.", "Run this there."
        )
    os.kill(pid, signal.SIGHUP)
    return pid


def daemon_pid(state: Path) -> int | None:
    """The pid of the daemon that holds a state folder's lock."""
    try:
        descriptor = os.open(state / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(descriptor, 32).decode()
        return int(pid) if pid.isdigit() else None
    finally:
        os.close(descriptor)
    return None

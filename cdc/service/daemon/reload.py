"""Taking a changed pipeline file over while the pipeline runs: what it means for whom. The plan is pure.

Nothing is restarted that need not be: sinks come, go and change one by one inside apply, tables inside capture, and a
change that would lose the position is refused as a whole, before anything is touched.
"""

import fcntl
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from cdc.config.settings import Section, Settings, SourceSettings
from cdc.errors import ConfigError, EnvironmentFault

_KEPT = ("slot", "publication", "database")
"""Of the source: with another of these, the log's position would mean nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a new file asks for: parts to start again, parts to tell, and each change in words."""

    restart: frozenset[str] = frozenset()
    tell: frozenset[str] = frozenset()
    changes: tuple[str, ...] = ()


def plan(before: Settings, after: Settings) -> Plan:
    """Compare two valid files. Raises ConfigError for what cannot change while the pipeline runs."""
    _refuse(before, after)
    restart: set[str] = set()
    tell: set[str] = set()
    changes = [*_tables(before, after), *_sinks(before, after)]
    if before.sinks != after.sinks:
        tell.add("apply")
    if before.source.tables != after.source.tables:
        tell |= {"capture", "apply"}
    for section, parts in (("log", {"capture", "apply"}), ("spark", {"apply"}), ("budgets", {"capture"})):
        if named := _named(section, getattr(before, section), getattr(after, section)):
            changes += named
            restart |= parts
    if before.http != after.http:
        changes += _named("http", before.http, after.http)
    if _connection(before.source) != _connection(after.source):
        changes += _named("source", before.source, after.source, skip=("tables",))
        restart |= {"capture", "apply"}
    return Plan(frozenset(restart), frozenset(tell - restart), tuple(changes))


def _refuse(before: Settings, after: Settings) -> None:
    found = [name for name in ("state",) if before.state != after.state]
    found += [f"source.{name}" for name in _KEPT if getattr(before.source, name) != getattr(after.source, name)]
    found += ["log.kind"] if before.log.kind != after.log.kind else []
    kept = {table.name: table for table in before.source.tables}
    found += [f"{table.name}" for table in after.source.tables if kept.get(table.name, table) != table]
    if found:
        raise ConfigError(
            f"{', '.join(found)} cannot change while the pipeline runs.",
            "Undo that, or stop the pipeline and start it again; it then says what becomes of its position.",
        )


def _tables(before: Settings, after: Settings) -> list[str]:
    old = {table.name: table for table in before.source.tables}
    new = {table.name: table for table in after.source.tables}
    return _differences("table", {str(k): v for k, v in old.items()}, {str(k): v for k, v in new.items()})


def _sinks(before: Settings, after: Settings) -> list[str]:
    found = _differences("sink", {sink.name: sink for sink in before.sinks}, {sink.name: sink for sink in after.sinks})
    return [
        f"{said} (the log keeps its place; release it with: millrace log forget)" if said.endswith(" removed") else said
        for said in found
    ]


def _differences(kind: str, old: dict[str, Section], new: dict[str, Section]) -> list[str]:
    return [
        *(f"{kind} {name} added" for name in new if name not in old),
        *(f"{kind} {name} removed" for name in old if name not in new),
        *(f"{kind} {name} changed" for name in new if name in old and old[name] != new[name]),
    ]


def _connection(source: SourceSettings) -> SourceSettings:
    return source.model_copy(update={"tables": ()})


def _named(section: str, before: Section, after: Section, skip: tuple[str, ...] = ()) -> list[str]:
    names = type(after).model_fields
    return [
        f"{section}.{name} changed"
        for name in names
        if name not in skip and getattr(before, name, None) != getattr(after, name)
    ]


def request(state: Path) -> int:
    """Have the running daemon read its file again; returns its pid. Raises EnvironmentFault if none runs."""
    pid = daemon_pid(state)
    if pid is None:
        raise EnvironmentFault(f"No millrace runs on the state folder {state}.", "Start it: millrace run")
    os.kill(pid, signal.SIGHUP)
    return pid


def daemon_pid(state: Path) -> int | None:
    """The daemon that holds a state folder's lock."""
    try:
        descriptor = os.open(state / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.read(descriptor, 32).decode()
        return int(said) if said.isdigit() else None
    finally:
        os.close(descriptor)
    return None

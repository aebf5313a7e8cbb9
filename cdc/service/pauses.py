"""What somebody asked to stand still: sinks and tables, in one small file that outlives every process.

A paused sink stops after its batch and goes on later from its own position. A paused table is held back from every
sink, and caught up in order when it is resumed (`cdc.service.holds`). Capture goes on in either case: the log keeps
what the others have not applied, and the slot never waits.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cdc.config import Settings
from cdc.errors import ConfigError, EnvironmentFault
from cdc.log import files
from cdc.model import TableId

_FILE = "paused.json"


@dataclass(frozen=True, slots=True)
class Paused:
    """What stands still. Tables as `schema.name`."""

    sinks: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()

    def facts(self) -> dict[str, list[str]]:
        """For JSON."""
        return {name: sorted(value) for name, value in asdict(self).items()}


def read(state: Path) -> Paused:
    """What is paused now. Raises EnvironmentFault where the file cannot be read: guessing would apply what is held."""
    try:
        facts = json.loads((state / _FILE).read_text(encoding="utf-8"))
        return Paused(frozenset(map(str, facts["sinks"])), frozenset(map(str, facts["tables"])))
    except FileNotFoundError:
        return Paused()
    except (OSError, ValueError, KeyError, TypeError):
        raise EnvironmentFault(
            f"{state / _FILE} is not readable.", "Remove it, and pause again what shall stand still."
        ) from None


def pause(settings: Settings, target: str) -> Paused:
    """Let a sink or a table stand still. Raises ConfigError for a name that the pipeline does not have."""
    return _changed(settings, target, wanted=True)


def resume(settings: Settings, target: str) -> Paused:
    """Let it go on. A name that is not in the pipeline any more may still be resumed."""
    return _changed(settings, target, wanted=False)


def _changed(settings: Settings, target: str, *, wanted: bool) -> Paused:
    now = read(settings.state)
    known = {sink.name for sink in settings.sinks}
    if target in known | now.sinks:
        after = replace(now, sinks=now.sinks | {target} if wanted else now.sinks - {target})
    else:
        table = _table(settings, target, now)
        after = replace(now, tables=now.tables | {table} if wanted else now.tables - {table})
    _write(settings.state, after)
    return after


def _table(settings: Settings, target: str, now: Paused) -> str:
    known = {str(table.name) for table in settings.source.tables}
    try:
        name = str(TableId.parse(target))
    except ValueError:
        name = target
    if name not in known | now.tables:
        raise ConfigError(
            f"{target!r} is neither a sink nor a table of this pipeline.",
            f"Sinks: {', '.join(sink.name for sink in settings.sinks) or 'none'}. "
            f"Tables: {', '.join(sorted(known)) or 'none'}.",
        )
    return name


def _write(state: Path, paused: Paused) -> None:
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(state / _FILE, json.dumps(paused.facts()).encode())
    except OSError as error:
        raise EnvironmentFault(
            f"{state / _FILE} cannot be written: {error.strerror}.", "Nothing was changed."
        ) from None

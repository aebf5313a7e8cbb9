"""`run`, `status` and `wait`."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cdc.cli.output import (
    DEFAULT_CONFIG,
    OUT,
    ConfigOption,
    JsonOption,
    complete_sink,
    complete_table,
    print_json,
    print_table,
)
from cdc.errors import ConfigError, MillraceError
from cdc.model import format_lsn, parse_lsn

if TYPE_CHECKING:
    from cdc.config.settings import Settings
    from cdc.service.observe.uncovered import Excepted, Scope

_NO_REASON = ("skipped", "dead letters", "backfill", "first snapshot")
"""Kinds that do not keep the pipeline from being ready; the others are among the reasons."""
_STALE = "Until then, positions are those last reported by capture and apply."


def run(
    config: ConfigOption = DEFAULT_CONFIG,
    log_format: Annotated[Literal["console", "json"], typer.Option(help="Format of log lines.")] = "console",
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait while another daemon runs this pipeline, and take over if it fails.")
    ] = False,
) -> None:
    """Run the pipeline: first snapshot, then live changes.

    Runs until SIGTERM or Ctrl-C; SIGHUP reloads the pipeline file (see: millrace reload).

    Example: millrace run --config millrace.yaml --log-format json
    """
    from cdc.service.daemon import daemon

    code = daemon.run(config, log_format, log_level, standby=standby)
    if code:
        _raise_final_error(config, code)
    sys.exit(code)


def _raise_final_error(config: Path, code: int) -> None:
    """Repeat the error that ended the pipeline, below the last log lines of its parts."""
    from cdc.service.daemon.process import settings_from
    from cdc.service.observe.health import nested
    from cdc.service.state import status as files

    state = settings_from(config).state
    for part in ("capture", "views", "apply"):
        facts = files.read(state, part)
        failure = nested(facts, "error")
        if facts.get("state") == "failed" and failure.get("message") and not failure.get("transient"):
            error = MillraceError(f"{part}: {failure['message']}", str(failure.get("remedy", "")))
            error.exit_code = code
            raise error


def status(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show the state of the pipeline and the lag of each sink.

    Exit code 0 only if the pipeline is ready.

    Example: millrace status --json
    """
    from cdc.service.daemon.process import settings_from

    facts = _facts(settings_from(config))
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    if not facts["ready"]:
        raise typer.Exit(1)


def _facts(settings: "Settings") -> dict[str, Any]:
    from cdc.service.daemon.reload import daemon_pid
    from cdc.service.observe.dead_letter_counts import DeadLetterCounts
    from cdc.service.observe.health import Reason, reasons
    from cdc.service.observe.positions import known_positions
    from cdc.service.observe.uncovered import PipelineProgress, Scope
    from cdc.service.state import pauses
    from cdc.service.state import status as files

    daemon, capture, apply = (files.read(settings.state, part) for part in ("daemon", "capture", "apply"))
    views = files.read(settings.state, "views") if settings.views else {}
    found = known_positions(settings)
    head, reached = found.head, found.reached
    dead_letters = DeadLetterCounts(settings.state, reached).read()
    progress = PipelineProgress(capture, apply, found.positions, dead_letters=dead_letters, views=views)
    troubles = reasons(capture, apply, tuple(reached), datetime.now(UTC), views=views, view_names=found.views)
    if daemon_pid(settings.state) is None and files.age(daemon, datetime.now(UTC)) > files.SILENT_AFTER:
        troubles = [Reason("daemon", "does not run.", "Start it: millrace run")]
    if found.trouble is not None:
        troubles.append(Reason("log", found.trouble.message, f"{found.trouble.remedy} {_STALE}"))
    return {
        "ready": not troubles,
        "reasons": [asdict(item) for item in troubles],
        "except": [asdict(item) for item in progress.excepted(Scope(tuple(reached)))],
        "log_answers": found.trouble is None,
        "log": format_lsn(head),
        "reached": {name: format_lsn(lsn) for name, lsn in reached.items()},
        "behind_bytes": {name: max(0, head - lsn) if lsn else None for name, lsn in reached.items()},
        "view_reached": {name: format_lsn(lsn) for name, lsn in found.views.items()},
        "view_behind_bytes": {name: max(0, head - lsn) if lsn else None for name, lsn in found.views.items()},
        "paused": pauses.read(settings.state).facts(),
        "standbys": _standbys(settings),
        "daemon": daemon,
        "capture": capture,
        "views": views,
        "apply": apply,
    }


def _standbys(settings: "Settings") -> list[dict[str, object]]:
    """What the waiting daemons of this pipeline last reported."""
    from cdc.service.standby.holder import STANDBY
    from cdc.service.state import status as files

    names = sorted(path.stem for path in files.folder(settings.state).glob(f"{STANDBY}*.json"))
    found = (files.read(settings.state, name) for name in names)
    return [facts for facts in found if files.age(facts, datetime.now(UTC)) <= files.SILENT_AFTER]


def _print(facts: Mapping[str, Any]) -> None:
    from cdc.service.observe.health import nested

    capture = facts["capture"]
    last = "" if facts["log_answers"] else " when it last answered"
    OUT.print(f"capture: {capture.get('state', 'not running')}, log at {facts['log']}{last}")
    if exact := capture.get("history_exact_from"):
        OUT.print(f"history: exact from {exact} on")
    rows = []
    for name, behind in facts["behind_bytes"].items():
        sink = nested(facts["apply"], "sinks", name)
        started = "in the first snapshot" if sink.get("batches") else "not started"
        rows.append((name, sink.get("state", "not running"), started if behind is None else f"{behind:,} bytes behind"))
    for name, behind in facts["view_behind_bytes"].items():
        state = nested(facts["views"], "views", name).get("state", "not running")
        rows.append((f"view {name}", state, "not started" if behind is None else f"{behind:,} bytes behind"))
    print_table(("sink or view", "state", "lag"), rows)
    for name, part in nested(facts["daemon"], "parts").items():
        if isinstance(part, Mapping) and part.get("restarts"):
            OUT.print(f"{name}: {part['restarts']} restart(s), last reason: {part.get('last_exit')}", markup=False)
        if isinstance(part, Mapping) and part.get("over_memory"):
            OUT.print(f"! {part['over_memory']}", markup=False, soft_wrap=True)
    if holder := nested(facts["daemon"], "lease").get("holder"):
        OUT.print(f"active: {holder}", markup=False)
    for one in facts["standbys"]:
        cut_off = "" if one.get("source_answers") else ", does not reach the source"
        OUT.print(f"standby: pid {one['pid']} on {one.get('host')}{cut_off}", markup=False)
    for item in facts["reasons"]:
        OUT.print(f"! {item['part']}: {item['message']} {item['remedy']}".rstrip(), markup=False, soft_wrap=True)
    for item in facts["except"]:
        if item["kind"] in _NO_REASON:
            OUT.print(_except_line(item), markup=False, soft_wrap=True)


def _except_line(item: Mapping[str, Any]) -> str:
    where = f"{item['sink']}: " if item["sink"] else ""
    return f"except {where}{item['message']}. {item['remedy']}".rstrip()


def wait(
    lsn: Annotated[str, typer.Argument(help="An LSN from pg_current_wal_lsn().")],
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SINK", help="Wait for this sink; may be repeated. Default: all.", autocompletion=complete_sink
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE", help="Wait for this table; may be repeated. Default: all.", autocompletion=complete_table
        ),
    ] = None,
    except_waiting: Annotated[
        bool, typer.Option("--except-waiting", help="Ignore tables that wait or are paused; name them.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Wait until the stores hold everything committed up to an LSN.

    Names what they lack even so: waiting or skipped tables, dead letters, rows not read yet.

    Example: millrace wait $(psql -Atc 'select pg_current_wal_lsn()') --sink redis
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.observe.positions import Positions
    from cdc.service.observe.uncovered import Scope

    try:
        wanted = parse_lsn(lsn)
    except ValueError as error:
        raise ConfigError(f"{error}.", "Take one from: select pg_current_wal_lsn()") from None
    settings = settings_from(config)
    positions = Positions(settings)
    scope = Scope(positions.chosen(tuple(sink or ())), _tables(settings, table or ()), except_waiting)
    deadline = time.monotonic() + timeout
    while behind := (progress := positions.progress()).behind(wanted, scope):
        if time.monotonic() > deadline:
            raise _late(f"{', '.join(behind)} did not reach {lsn} in {timeout:g} s.", progress.excepted(scope), scope)
        time.sleep(0.02)
    lacking = [asdict(item) for item in progress.excepted(scope)]
    if as_json:
        sys.stdout.write(json.dumps({"reached": True, "lsn": lsn, "except": lacking}) + "\n")
        return
    OUT.print(f"All reached {lsn}{', except:' if lacking else '.'}")
    for item in lacking:
        OUT.print(_except_line(item).removeprefix("except "), markup=False, soft_wrap=True)


def _late(message: str, lacking: "Sequence[Excepted]", scope: "Scope") -> MillraceError:
    waiting = [f"{item.message}." for item in lacking if item.kind == "waiting"]
    if not waiting or scope.except_waiting:
        return MillraceError(message, "See: millrace status")
    return MillraceError(" ".join([message, *waiting]), "See: millrace status; to ignore them: --except-waiting")


def _tables(settings: "Settings", names: Sequence[str]) -> frozenset[str]:
    known = set(map(str, settings.tables))
    if unknown := sorted(set(names) - known):
        raise ConfigError(f"No table is called {unknown[0]}.", f"Tables: {', '.join(sorted(known))}.")
    return frozenset(names)

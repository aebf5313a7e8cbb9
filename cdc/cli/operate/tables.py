"""`tables` and `lag`: the state of each table, and the lag of each sink."""

import time
from collections.abc import Collection
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from cdc.cli.output import DEFAULT_CONFIG, ERR, ConfigOption, JsonOption, print_json, print_table
from cdc.errors import LogLost, MillraceError

if TYPE_CHECKING:
    from cdc.config.settings import Settings
    from cdc.service.observe.lag import Lags, SinkLag
    from cdc.service.state.status import Facts

_OPEN = ("running", "paused", "failed")


def tables(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show the state, change counts and newest commit of each table.

    Counts begin when capture and apply start. A sink counts fewer changes than were captured if a batch has several
    changes of one row: only the newest is applied.

    Example: millrace tables --json
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.state import pauses, status

    settings = settings_from(config)
    capture, apply = status.read(settings.state, "capture"), status.read(settings.state, "apply")
    views = {str(view.table): _view(settings, view.name) for view in settings.views}
    paused = pauses.read(settings.state).tables
    found = [_facts(str(table), settings, capture, apply, paused) for table in settings.tables]
    for facts in found:
        if (view := views.get(str(facts["table"]))) and facts["state"] == capture.get("state"):
            facts["state"] = view
    if as_json:
        print_json(found)
        return
    rows = [
        (
            facts["table"],
            facts["state"],
            _number(facts["captured"]),
            *(_number(_section(facts, "applied").get(sink.name)) for sink in settings.sinks),
            facts["newest_commit"] or "",
        )
        for facts in found
    ]
    print_table(("table", "state", "captured", *(sink.name for sink in settings.sinks), "last commit"), rows)


def _view(settings: "Settings", name: str) -> str:
    """The state of a view, by the process that runs it."""
    from cdc.service.observe.health import nested
    from cdc.service.state import status

    facts = status.read(settings.state, "views")
    if status.age(facts, datetime.now(UTC)) > status.SILENT_AFTER:
        return "view not running"
    return f"view {nested(facts, 'views', name).get('state', 'starting')}"


def lag(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show the lag of each sink and view, in seconds and bytes of WAL.

    First capture, from the source to the log; then each sink, and its tables that lag. The lag of a view counts to its
    rows in the log; a sink's table of a view lags at least as much.

    Example: millrace lag --json | jq '.sinks.redis.seconds'
    """
    from cdc.service.daemon.process import settings_from

    lags, trouble = lags_now(settings_from(config))
    if as_json:
        by_table: dict[str, dict[str, object]] = {}
        for (sink, table), one in lags.tables.items():
            by_table.setdefault(sink, {})[table] = asdict(one)
        sinks = {name: {**asdict(one), "tables": by_table.get(name, {})} for name, one in lags.sinks.items()}
        views = {name: asdict(one) for name, one in lags.views.items()}
        print_json({"capture": asdict(lags.capture), "views": views, "sinks": sinks, "trouble": str(trouble or "")})
        _exit_if_stale(trouble)
        return
    rows = [("source to log", "", *_shown(lags.capture))]
    rows += [(f"view {name}", "", *_shown(one)) for name, one in lags.views.items()]
    for name, one in lags.sinks.items():
        rows.append((name, "", *_shown(one)))
        rows += [("", table, *_shown(own)) for (sink, table), own in lags.tables.items() if sink == name and own.bytes]
    print_table(("", "table", "seconds behind", "bytes behind"), rows)
    _exit_if_stale(trouble)


def _exit_if_stale(trouble: LogLost | None) -> None:
    """If the log does not answer, the figures are old: say so, and exit with 1."""
    if trouble is not None:
        ERR.print(
            f"! log: {trouble} The lags are computed from what capture and apply last reported.",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


def lags_now(settings: "Settings") -> "tuple[Lags, LogLost | None]":
    """The lags now, from a single observation."""
    from cdc.service.observe.lag import LagInputs, Lags
    from cdc.service.observe.positions import known_positions
    from cdc.service.state import status

    sinks = {sink.name: [str(name) for name in settings.tables_of(sink)] for sink in settings.sinks}
    capture = status.read(settings.state, "capture")
    if not capture:
        raise MillraceError(f"No pipeline has run yet on {settings.state}.", "Start it: millrace run")
    lags, found = Lags(), known_positions(settings)
    lags.update(LagInputs(time.time(), capture, found.head, found.reached, sinks, found.positions, found.views))
    return lags, found.trouble


def _shown(one: "SinkLag") -> tuple[str, str]:
    return f"{one.seconds:,.1f}", f"{one.bytes:,}"


def _facts(
    table: str, settings: "Settings", capture: "Facts", apply: "Facts", paused: frozenset[str]
) -> dict[str, object]:
    from cdc.service.observe.health import nested
    from cdc.service.observe.page_model import count

    applied = {
        sink.name: count(nested(apply, "sinks", sink.name, "changes").get(table))
        for sink in settings.sinks
        if not sink.tables or table in map(str, sink.tables)
    }
    return {
        "table": table,
        "state": _state(table, capture, apply, paused),
        "captured": sum(map(count, nested(capture, "changes", table).values())),
        "applied": applied,
        "newest_commit": nested(capture, "tables", table).get("at"),
    }


def _state(table: str, capture: "Facts", apply: "Facts", paused: frozenset[str]) -> str:
    from cdc.service.observe.health import nested
    from cdc.service.state.status import SILENT_AFTER, age

    if table in paused:
        return "paused"
    if age(capture, datetime.now(UTC)) > SILENT_AFTER:
        return "not running"
    if table in nested(capture, "tables_waiting"):
        return "not followed"
    for kind in ("waiting", "skipped", "refilling"):
        if sinks := [sink for sink in nested(apply, "sinks") if table in _listed(apply, sink, f"tables_{kind}")]:
            return f"{kind} in {', '.join(sinks)}"
    jobs = capture.get("backfills")
    for job in jobs if isinstance(jobs, list) else ():
        if job.get("table") == table and job.get("state") in _OPEN:
            return f"backfill {job['state']}"
    return str(capture.get("state", "starting"))


def _listed(apply: "Facts", sink: str, name: str) -> Collection[str]:
    from cdc.service.observe.health import nested

    found = nested(apply, "sinks", sink).get(name)
    return found if isinstance(found, (list, dict)) else ()


def _section(facts: dict[str, object], name: str) -> dict[str, object]:
    found = facts[name]
    return found if isinstance(found, dict) else {}


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"

"""`backfill`: have tables read again beside the stream, and steer what is under way.

The request goes through the source's WAL, so it is obeyed by whichever process captures, now or at its next start.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cdc.cli.screen import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json, print_table
from cdc.errors import ConfigError, MillraceError
from cdc.model import TableId
from snapshots.requests import Request, ask, steer

if TYPE_CHECKING:
    from cdc.config import Settings

Facts = dict[str, Any]
_ENDED = ("done", "failed", "cancelled")
_STALE_SECONDS = 15.0


def backfill(
    table: Annotated[str, typer.Argument(help="schema.name; leave it out to list the backfills.")] = "",
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    where: Annotated[str, typer.Option(help="SQL condition over the table's columns.")] = "",
    since: Annotated[str, typer.Option(help="COLUMN=VALUE: only rows from this value on.")] = "",
    keys: Annotated[str, typer.Option(help='Only these keys: 1,2,3 or JSON such as [[1,"a"],[2,"b"]].')] = "",
    pause: Annotated[str, typer.Option(help="Pause the backfill with this id, or all.")] = "",
    resume: Annotated[str, typer.Option(help="Go on with the backfill with this id, or all.")] = "",
    cancel: Annotated[str, typer.Option(help="Give up the backfill with this id, or all.")] = "",
    wait: Annotated[bool, typer.Option(help="Follow it to its end.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Read a table again beside the stream, whole or in part; live changes always win.

    Example: millrace backfill public.orders --since updated_at=2026-01-01
    """
    from cdc.service.part import settings_from

    settings = settings_from(config)
    steering = {"pause": pause, "resume": resume, "cancel": cancel}
    for verb, identity in steering.items():
        if identity:
            _send(settings, steer(verb, identity))
    if table:
        _read_again(settings, _request(table, where, since, keys), wait, as_json)
    elif not any(steering.values()):
        _list(settings, as_json)


def _read_again(settings: "Settings", request: Request, wait: bool, as_json: bool) -> None:
    from snapshots.control import control_key

    if request.table not in {captured.name for captured in settings.source.tables}:
        known = ", ".join(str(captured.name) for captured in settings.source.tables)
        raise ConfigError(f"Table {request.table} is not captured.", f"Tables: {known}.")
    identity = _send(settings, ask(request, control_key(settings.state)))
    facts = _follow(settings, identity, as_json) if wait else {"id": identity, "state": "requested"}
    if as_json:
        print_json(facts)
    elif not wait:
        OUT.print(f"Requested backfill {identity} of {request.table}.", markup=False)
    if facts["state"] in ("failed", "cancelled"):
        raise MillraceError(
            f"Backfill {identity} of {request.table} was {facts['state']}. {facts.get('reason', '')}".strip(),
            f"Try again with: millrace backfill --resume {identity}" if facts["state"] == "failed" else "",
        )


def _request(table: str, where: str, since: str, keys: str) -> Request:
    try:
        name = TableId.parse(table)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    column, equals, value = since.partition("=")
    if since and not (equals and column):
        raise ConfigError(f"--since {since!r} is not COLUMN=VALUE.", "For instance: --since updated_at=2026-01-01")
    return Request(name, where, (column, value) if since else None, _keys(keys))


def _keys(text: str) -> tuple[tuple[str, ...], ...]:
    if not text.lstrip().startswith("["):
        return tuple((key.strip(),) for key in text.split(",") if key.strip())
    try:
        listed = json.loads(text)
    except ValueError:
        raise ConfigError("--keys is not valid JSON.", 'For instance: --keys \'[[1,"a"],[2,"b"]]\'') from None
    return tuple(tuple(map(str, key)) if isinstance(key, list) else (str(key),) for key in listed)


def _send(settings: "Settings", message: str) -> str:
    """Write a message into the WAL; returns the id that a request has by its place there."""
    from cdc.capture.connect import connect
    from snapshots.messages import say

    with connect(settings.source, "millrace cli") as connection:
        return f"{say(connection, message):X}"


def _follow(settings: "Settings", identity: str, quiet: bool) -> Facts:
    """Show the progress until the backfill has ended."""
    from cdc.service import status

    with _screen(quiet) as show:
        while True:
            seen = status.read(settings.state, "capture")
            facts = next((job for job in _backfills(seen) if job["id"] == identity), None)
            if facts is not None:
                show(facts)
                if facts["state"] in _ENDED:
                    return facts
            if status.age(seen, datetime.now(UTC)) > _STALE_SECONDS:
                raise MillraceError(
                    f"The pipeline does not run; backfill {identity} begins when it does.", "Start it: millrace run"
                )
            time.sleep(0.2)


def _backfills(seen: dict[str, object]) -> list[Facts]:
    found = seen.get("backfills")
    return found if isinstance(found, list) else []


@contextmanager
def _screen(quiet: bool) -> Iterator[Callable[[Facts], None]]:
    """A bar in a terminal, a line per change in a pipe, nothing when JSON is wanted."""
    if quiet:
        yield lambda facts: None
    elif OUT.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=OUT) as progress:
            task = progress.add_task("waiting", total=None)
            yield lambda facts: progress.update(
                task, description=_said(facts), completed=facts["rows"], total=facts.get("estimate") or None
            )
    else:
        yield _Lines().show


class _Lines:
    """Plain lines, each said once."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, facts: Facts) -> None:
        line = f"{_said(facts)}: {facts['rows']} rows"
        if line != self._last:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            self._last = line


def _said(facts: Facts) -> str:
    waiting = f", waiting for {facts['waiting']}" if facts.get("waiting") else ""
    return f"{facts['table']} {facts['state']}{waiting}"


def _list(settings: "Settings", as_json: bool) -> None:
    from cdc.service import status

    found = _backfills(status.read(settings.state, "capture"))
    if as_json:
        print_json(found)
        return
    names = ("id", "table", "state", "rows", "estimate", "rows_per_second", "eta_seconds", "reason")
    print_table([name.replace("_", " ") for name in names], [[job.get(name, "") for name in names] for job in found])

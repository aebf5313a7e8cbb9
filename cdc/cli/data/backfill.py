"""`backfill`: read tables again while live changes continue; list, pause, resume and cancel backfills.

The request goes through the source's WAL, so the capture process receives it now or at its next start.
"""

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json, print_table
from cdc.cli.progress import HEADINGS, Facts, progress_display, table_row
from cdc.errors import ConfigError, MillraceError
from cdc.model import TableId
from snapshots.backfill.requests import Request, backfill_message, control_message

if TYPE_CHECKING:
    from cdc.config.settings import Settings

_ENDED = ("done", "failed", "cancelled")
_STALE_SECONDS = 15.0
_ANSWER_SECONDS = 10.0
_STATES_AFTER = {"pause": ("paused", *_ENDED), "resume": ("running", *_ENDED), "cancel": ("cancelled", "done")}


def backfill(
    table: Annotated[str, typer.Argument(help="A table as schema.name; without it, list the backfills.")] = "",
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    where: Annotated[str | None, typer.Option(metavar="SQL", help="Only rows that match this SQL condition.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="COLUMN=VALUE", help="Only rows with this or a greater value.")
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="KEYS", help='Only these keys: 1,2,3 or JSON such as [[1,"a"],[2,"b"]].')
    ] = None,
    pause: Annotated[str, typer.Option(metavar="ID", help="Pause the backfill with this id, or all.")] = "",
    resume: Annotated[str, typer.Option(metavar="ID", help="Resume the backfill with this id, or all.")] = "",
    cancel: Annotated[str, typer.Option(metavar="ID", help="Cancel the backfill with this id, or all.")] = "",
    wait: Annotated[bool, typer.Option(help="Show the progress until it ends.")] = True,
    sql: Annotated[bool, typer.Option("--sql", help="Print the signed SQL instead of sending it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read a table again, whole or in part, beside live changes.

    A live change always wins over a row that is read. Without a table, lists the backfills.

    Example: millrace backfill public.orders --since updated_at=2026-01-01
    """
    from cdc.service.daemon.process import settings_from

    settings = settings_from(config)
    actions = {"pause": pause, "resume": resume, "cancel": cancel}
    if sql:
        asked = [_request(table, where, since, keys)] if table else []
        _print_sql(settings, asked, {verb: identity for verb, identity in actions.items() if identity})
        return
    changed = [job for verb, identity in actions.items() if identity for job in _steer(settings, verb, identity)]
    if as_json and not table and changed:
        print_json(changed)
    for job in () if as_json else changed:
        OUT.print(f"Backfill {job['id']} of {job['table']} is {job['state']}.", markup=False)
    if table:
        _start(settings, _request(table, where, since, keys), wait, as_json)
    elif not any(actions.values()):
        _list(settings, as_json)


def _print_sql(settings: "Settings", asked: list[Request], actions: dict[str, str]) -> None:
    """Print the statements for a user who can reach the source. Each is signed, and valid only for its own request."""
    from psycopg import sql

    from snapshots.backfill.signing_key import control_key
    from snapshots.tables.wal_messages import PREFIX

    key = control_key(settings.state)
    messages = [
        *(control_message(verb, identity, key) for verb, identity in actions.items()),
        *(backfill_message(one, key) for one in asked),
    ]
    for message in messages:
        statement = sql.SQL("select pg_logical_emit_message(true, {}, {});").format(PREFIX, message)
        OUT.print(statement.as_string(None), markup=False, highlight=False, soft_wrap=True)


def _start(settings: "Settings", request: Request, wait: bool, as_json: bool) -> None:
    from snapshots.backfill.signing_key import control_key

    if view := next((one.name for one in settings.views if one.table == request.table), ""):
        raise ConfigError(
            f"{request.table} is a view: its rows are computed from the log, not read from Postgres.",
            f"To apply its rows in the log again: millrace replay --table {request.table}; to have it hand over all "
            f"its rows again: millrace view emit {view}",
        )
    if request.table not in {captured.name for captured in settings.source.tables}:
        known = ", ".join(str(captured.name) for captured in settings.source.tables)
        raise ConfigError(f"Table {request.table} is not captured.", f"Tables: {known}.")
    identity = _send(settings, backfill_message(request, control_key(settings.state)))
    facts = _show_progress(settings, identity, as_json) if wait else {"id": identity, "state": "requested"}
    if as_json:
        print_json(facts)
    elif not wait:
        OUT.print(f"Requested backfill {identity} of {request.table}.", markup=False)
    if facts["state"] in ("failed", "cancelled"):
        raise MillraceError(
            f"Backfill {identity} of {request.table} was {facts['state']}. {facts.get('reason', '')}".strip(),
            f"Resume it with: millrace backfill --resume {identity}" if facts["state"] == "failed" else "",
        )


def _request(table: str, where: str | None, since: str | None, keys: str | None) -> Request:
    """Raises ConfigError. The trap: an empty --where or --keys, perhaps a script's mistake, must not mean every row."""
    try:
        name = TableId.parse(table)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    column, equals, value = (since or "").partition("=")
    if since is not None and not (equals and column):
        raise ConfigError(f"--since {since!r} is not COLUMN=VALUE.", "For example: --since updated_at=2026-01-01")
    if where is not None and not where.strip():
        raise ConfigError("--where is empty.", "Leave it out to read the whole table.")
    listed = _keys(keys or "")
    if keys is not None and not listed:
        raise ConfigError("--keys names no key.", "Leave it out to read the whole table.")
    return Request(name, where or "", (column, value) if since is not None else None, listed)


def _keys(text: str) -> tuple[tuple[str, ...], ...]:
    if not text.lstrip().startswith("["):
        return tuple((key.strip(),) for key in text.split(",") if key.strip())
    try:
        listed = json.loads(text)
    except ValueError:
        raise ConfigError("--keys is not valid JSON.", 'For example: --keys \'[[1,"a"],[2,"b"]]\'') from None
    return tuple(tuple(map(str, key)) if isinstance(key, list) else (str(key),) for key in listed)


def _send(settings: "Settings", message: str) -> str:
    """Write a message into the WAL; returns its LSN, which is the id of a request."""
    from cdc.capture.source.connect import connect
    from snapshots.tables.wal_messages import write_message

    with connect(settings.source, "millrace cli") as connection:
        return f"{write_message(connection, message):X}"


def _steer(settings: "Settings", verb: str, identity: str) -> list[Facts]:
    """Pause, resume or cancel, and wait until it is done. Raises ConfigError if there is no such backfill."""
    from snapshots.backfill.signing_key import control_key

    chosen = {job["id"] for job in _backfills(settings) if identity in (job["id"], "all" if _open(job) else "")}
    if not chosen and identity != "all":
        raise ConfigError(f"There is no backfill {identity}.", "List them with: millrace backfill")
    _send(settings, control_message(verb, identity, control_key(settings.state)))
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        jobs = [job for job in _backfills(settings) if job["id"] in chosen]
        if all(job["state"] in _STATES_AFTER[verb] for job in jobs):
            return jobs
        if time.monotonic() > deadline:
            raise MillraceError(
                f"Asked to {verb} backfill {identity}, but the pipeline has not answered.",
                "It does so when it runs. See: millrace status",
            )
        time.sleep(0.2)


def _open(job: Facts) -> bool:
    return job["state"] in ("running", "paused")


def _show_progress(settings: "Settings", identity: str, quiet: bool) -> Facts:
    """Show the progress until the backfill has ended. Ctrl-C does not stop it."""
    from cdc.service.state import status

    try:
        with progress_display(quiet) as show:
            while True:
                facts = next((job for job in _backfills(settings) if job["id"] == identity), None)
                if facts is not None:
                    show(facts)
                    if facts["state"] in _ENDED:
                        return facts
                if status.age(status.read(settings.state, "capture"), datetime.now(UTC)) > _STALE_SECONDS:
                    raise MillraceError(
                        f"The pipeline does not run; backfill {identity} starts when it does.", "Start it: millrace run"
                    )
                time.sleep(0.2)
    except KeyboardInterrupt:
        raise MillraceError(
            f"Backfill {identity} continues in the background.", f"To end it: millrace backfill --cancel {identity}"
        ) from None


def _backfills(settings: "Settings") -> list[Facts]:
    from cdc.service.state import status

    found = status.read(settings.state, "capture").get("backfills")
    return found if isinstance(found, list) else []


def _list(settings: "Settings", as_json: bool) -> None:
    from cdc.service.state import status

    found = _backfills(settings)
    if as_json:
        print_json(found)
        return
    print_table(HEADINGS, [table_row(job) for job in found])
    if OUT.is_terminal:
        exact = status.read(settings.state, "capture").get("history_exact_from")
        OUT.print(f"The log's history is exact from {exact} on." if exact else "The log's history is not exact yet.")

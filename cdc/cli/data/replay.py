"""`replay`: apply a range of the log again to chosen sinks."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cdc.cli.output import DEFAULT_CONFIG, ERR, OUT, ConfigOption, JsonOption, print_json
from cdc.errors import ConfigError
from cdc.model import Lsn, format_lsn, parse_lsn

if TYPE_CHECKING:
    from cdc.service.apply.replay import Replayed


def replay(
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: Annotated[
        list[str] | None, typer.Option(metavar="SINK", help="Only to this sink; may be repeated. Default: all.")
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE", help="Only this table, as schema.name; may be repeated. Default: all."),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help='Only this key, as JSON: {"id":42}; may be repeated.')
    ] = None,
    start: Annotated[
        str, typer.Option("--from", metavar="POINT", help="An LSN, a time (ISO 8601), or `beginning`.")
    ] = "beginning",
    until: Annotated[str, typer.Option(metavar="POINT", help="An LSN or a time; default: the head of the log.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be applied.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Apply a range of the log to the stores again.

    The live pipeline keeps running. No key gets an older value: stores ignore changes older than their own.

    Example: millrace replay --sink redis --table public.orders --from 2026-01-31T10:00:00Z
    """
    from cdc.service.apply.replay import ReplayRange, replay
    from cdc.service.daemon.process import settings_from
    from cdc.service.inspect.verification import chosen_sinks, parsed_table
    from cdc.service.inspect.why import log_key

    settings = settings_from(config)
    keys = tuple(log_key(text) for text in key or ())
    tables = tuple(parsed_table(text) for text in table or ())
    asked = ReplayRange(_point(start), _point(until), tables, keys)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=ERR, disable=as_json or not ERR.is_terminal) as bar:
        shown = bar.add_task("reading the log")

        def report(done: "Replayed") -> None:
            bar.update(shown, description=f"{done.changes:,} changes, log at {format_lsn(done.at)}")

        done = replay(settings, chosen_sinks(settings, sink or ()), asked, report, dry_run)
    if as_json:
        facts = {"entries": done.entries, "changes": done.changes, "lsn": format_lsn(done.at), "dry_run": dry_run}
        print_json(facts)
    else:
        verb = "would be applied" if dry_run else "applied; the stores ignored those older than what they have"
        OUT.print(f"{done.changes:,} changes of {done.entries:,} log entries {verb}.")


def _point(text: str) -> Lsn | datetime | None:
    if text in {"", "beginning"}:
        return None
    try:
        return parse_lsn(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is neither an LSN nor a time.", "Write 16/B374D848, 2026-01-31T10:00:00Z or beginning."
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)

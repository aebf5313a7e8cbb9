"""`log`: show and maintain the log."""

import json
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from cdc.cli.operate import log_space
from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json, print_table
from cdc.config.settings import Settings
from cdc.errors import ConfigError, LogLost
from cdc.model import format_lsn, parse_lsn
from cdc.ports import LogReader, Slice

app = typer.Typer(help="Show and maintain the log.", no_args_is_help=True)
app.command()(log_space.compact)
app.command()(log_space.trim)

_HEADINGS = ("offset", "end", "rows", "tables", "committed")


def _opened(config: ConfigOption) -> tuple[Settings, LogReader]:
    from cdc.service.daemon.process import settings_from
    from cdc.service.observe.positions import open_log

    settings = settings_from(config)
    return settings, open_log(settings)


def _facts(piece: Slice) -> dict[str, object]:
    """A summary of a slice, without row values: those may be private."""
    times = piece.rows["commit_ts"]
    return {
        "offset": piece.offset,
        "end": format_lsn(piece.end),
        "rows": piece.rows.num_rows,
        "tables": sorted({str(name) for name in piece.rows["table"].unique().to_pylist()}),
        "committed": None if not piece.rows.num_rows else str(times[-1].as_py()),
    }


def _newest(reader: LogReader, entries: int) -> Sequence[Slice]:
    """The last entries. Seeks back in growing steps of time instead of reading a long log whole."""
    now = datetime.now(UTC)
    for back in (timedelta(minutes=1), timedelta(hours=1), timedelta(days=1), None):
        after = reader.start() if back is None else reader.seek(now - back)
        newest = deque(reader.read(after), maxlen=entries)
        if len(newest) == entries:
            break
    return newest


@app.command()
def tail(
    config: ConfigOption = DEFAULT_CONFIG,
    entries: Annotated[int, typer.Option("--entries", "-n", min=1, help="Number of entries.")] = 10,
    values: Annotated[bool, typer.Option("--values", help="Print the changes, one JSON object per line.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the newest log entries.

    Example: millrace log tail -n 3 --values
    """
    _, reader = _opened(config)
    newest = _newest(reader, entries)
    if values:
        for piece in newest:
            _print_rows(piece)
        return
    found = [_facts(piece) for piece in newest]
    if as_json:
        print_json(found)
    else:
        _print_entries(found)


@app.command()
def show(
    config: ConfigOption = DEFAULT_CONFIG,
    since: Annotated[
        str, typer.Option("--since", metavar="LSN", help="Only entries that end after this LSN, such as 16/B374D848.")
    ] = "",
    values: Annotated[bool, typer.Option("--values", help="Print the changes, one JSON object per line.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show all log entries, or those after an LSN.

    Example: millrace log show --since 0/1526238 --json
    """
    _, reader = _opened(config)
    after = reader.start()
    if since:
        try:
            after = reader.seek(parse_lsn(since))
        except ValueError as error:
            raise ConfigError(f"--since: {error}.", "Copy an LSN from: millrace log positions") from None
    pieces = reader.read(after)
    if values:
        for piece in pieces:
            _print_rows(piece)
        return
    found = (_facts(piece) for piece in pieces)
    if as_json:
        print_json(list(found))
    else:
        _print_entries(list(found))


@app.command()
def positions(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show the range of the log and the position of each consumer.

    Example: millrace log positions --json
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.observe.positions import open_log

    settings = settings_from(config)
    try:
        reader = open_log(settings)
    except LogLost as error:
        _print_last_reported(settings, error, as_json)
        raise
    head, end = reader.head()
    lags = {lag.consumer: lag for lag in reader.lags()}
    consumers = [
        {
            "consumer": item.name,
            "offset": item.offset,
            "reached": format_lsn(item.reached),
            "at": item.at.isoformat(),
            "lag_bytes": lags[item.name].bytes if item.name in lags else None,
            "lag_entries": lags[item.name].entries if item.name in lags else None,
            "lag_seconds": round(lags[item.name].seconds, 3) if item.name in lags else None,
        }
        for item in reader.consumers()
    ]
    if as_json:
        print_json({"start": reader.start(), "head": head, "end": format_lsn(end), "consumers": consumers})
        return
    OUT.print(f"The log holds offsets {reader.start()} to {head} and reaches {format_lsn(end)}.", markup=False)
    headings = ("consumer", "offset", "reached", "at", "bytes behind", "entries behind", "seconds behind")
    print_table(headings, [tuple(consumer.values()) for consumer in consumers])


def _print_last_reported(settings: Settings, error: LogLost, as_json: bool) -> None:
    """What capture and apply last reported of a log that does not answer."""
    from cdc.service.observe.positions import last_reported

    known = last_reported(settings, error)
    end, reached = format_lsn(known.head), {name: format_lsn(lsn) for name, lsn in known.reached.items()}
    if as_json:
        consumers = [{"consumer": name, "reached": lsn} for name, lsn in reached.items()]
        print_json({"start": None, "head": None, "end": end, "consumers": consumers, "trouble": str(error)})
        return
    OUT.print(f"When it last answered, the log reached {end}.", markup=False)
    print_table(("consumer", "reached"), list(reached.items()))


@app.command()
def forget(
    consumer: Annotated[str, typer.Argument(help="The consumer's name, from: millrace log positions")],
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Forget a consumer, so that retention no longer keeps entries for it.

    For a sink that was removed from the pipeline.

    Example: millrace log forget old_lake
    """
    _, reader = _opened(config)
    names = [item.name for item in reader.consumers()]
    if consumer not in names:
        raise ConfigError(f"No consumer {consumer!r} is registered.", f"Registered: {', '.join(names) or 'none'}.")
    reader.forget(consumer)
    OUT.print(f"Forgot {consumer}: retention no longer waits for it.", markup=False)


@app.command()
def quarantine(
    sequence: Annotated[int, typer.Argument(min=1, help="A sequence number of the segment, from its file name.")],
    config: ConfigOption = DEFAULT_CONFIG,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove an unreadable segment from the log. Its changes are lost.

    The file is kept under `quarantine`. Read the tables again afterwards: millrace backfill

    Example: millrace log quarantine 4711 --yes
    """
    from cdc.log.segments.log import writer_storage
    from cdc.log.segments.quarantine import quarantine as move_out

    settings, _ = _opened(config)
    if settings.log.kind != "segments":
        raise ConfigError(f"A log of kind {settings.log.kind} has no segments.", "Use that log's own tools.")
    if not yes:
        typer.confirm(f"Remove the segment with sequence {sequence} from the log and lose its changes?", abort=True)
    with closing(writer_storage(settings, unreadable=sequence)) as storage:
        gone = move_out(storage, sequence)
    OUT.print(
        f"Removed {gone.described}: {gone.rows} change(s). Read its tables again: millrace backfill", markup=False
    )


def _print_rows(piece: Slice) -> None:
    for row in piece.rows.to_pylist():
        OUT.out(json.dumps({**row, "commit_ts": str(row["commit_ts"])}, ensure_ascii=False))


def _print_entries(found: list[dict[str, object]]) -> None:
    print_table(_HEADINGS, [[_cell(value) for value in item.values()] for item in found])


def _cell(value: object) -> object:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else value

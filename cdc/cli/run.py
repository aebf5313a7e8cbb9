"""`run`, `status` and `wait`."""

import json
import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from cdc.cli.screen import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, complete_sink, print_json, print_table
from cdc.errors import ConfigError, MillraceError
from cdc.model import format_lsn, parse_lsn


def run(
    config: ConfigOption = DEFAULT_CONFIG,
    log_format: Annotated[Literal["console", "json"], typer.Option(help="Lines for people, or JSON.")] = "console",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run the pipeline: snapshot, then follow the source until stopped.

    Example: millrace run --config millrace.yaml --log-format json
    """
    from cdc.service import daemon

    sys.exit(daemon.run(config, log_format, log_level))


def status(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show what the pipeline is doing and how far each store is. Exit code 0 only when all is well.

    Example: millrace status --json
    """
    from cdc.service import status as files
    from cdc.service.health import nested, reasons
    from cdc.service.part import settings_from
    from cdc.service.reached import Positions

    settings = settings_from(config)
    capture, apply = files.read(settings.state, "capture"), files.read(settings.state, "apply")
    positions = Positions(settings)
    head, reached = positions.head(), positions.reached()
    names = tuple(sink.name for sink in settings.sinks)
    troubles = reasons(capture, apply, names, datetime.now(UTC))
    if as_json:
        applied = {name: format_lsn(lsn) for name, lsn in reached.items()}
        wrong = [{"part": item.part, "message": item.message, "remedy": item.remedy} for item in troubles]
        facts = {"ready": not troubles, "reasons": wrong, "log": format_lsn(head), "reached": applied}
        print_json({**facts, "capture": capture, "apply": apply})
    else:
        OUT.print(f"capture: {capture.get('state', 'not running')}, log at {format_lsn(head)}")
        rows = []
        for name in names:
            lag = f"{max(0, head - reached[name]):,} bytes behind" if reached[name] else "not started"
            rows.append((name, nested(apply, "sinks", name).get("state", "not running"), lag))
        print_table(("sink", "state", "lag"), rows)
        for item in troubles:
            OUT.print(f"! {item.part}: {item.message} {item.remedy}", markup=False)
    if troubles:
        raise typer.Exit(1)


def wait(
    lsn: Annotated[str, typer.Argument(help="An LSN, as pg_current_wal_lsn() gives it.")],
    config: ConfigOption = DEFAULT_CONFIG,
    sink: Annotated[
        list[str] | None,
        typer.Option(help="Wait for this sink; may be repeated. Default: all.", autocompletion=complete_sink),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Wait until the stores hold everything committed up to an LSN.

    Example: millrace wait $(psql -Atc 'select pg_current_wal_lsn()') --sink redis
    """
    from cdc.service.part import settings_from
    from cdc.service.reached import Positions

    try:
        wanted = parse_lsn(lsn)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    positions = Positions(settings_from(config))
    deadline = time.monotonic() + timeout
    while behind := positions.behind(wanted, tuple(sink or ())):
        if time.monotonic() > deadline:
            raise MillraceError(f"{', '.join(behind)} did not reach {lsn} in {timeout:g} s.", "See: millrace status")
        time.sleep(0.02)
    if as_json:
        sys.stdout.write(json.dumps({"reached": True, "lsn": lsn}) + "\n")
    else:
        OUT.print(f"All reached {lsn}.")

"""`view run`: run one view in the foreground and print what it computes."""

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, ConfigOption, complete_view
from cdc.errors import ConfigError
from cdc.model import Lsn, format_lsn, parse_lsn

if TYPE_CHECKING:
    import pyarrow as pa


def run(
    name: Annotated[str, typer.Argument(help="The view's name.", autocompletion=complete_view)],
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    limit: Annotated[int, typer.Option(min=0, help="Print at most so many rows; 0: all.")] = 0,
    until: Annotated[str, typer.Option(metavar="LSN", help="Stop once everything up to this LSN is reflected.")] = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="Give up if nothing comes for so long.")] = 30.0,
) -> None:
    """Run a view from the beginning of the log, and print its rows as JSON, one object per line.

    Ends when the view has caught up with the log. Writes to no store and changes nothing in the pipeline, which may run
    or not: use it to try a definition.

    Example: millrace view run totals --limit 10
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.observe.positions import open_log
    from cdc.service.views.engine import open_view
    from cdc.service.views.foreground import changes
    from cdc.service.views.view_run import view_named

    settings = settings_from(config)
    view = view_named(settings, name)
    found = changes(settings, view, open_log(settings), open_view, until=_lsn(until), seconds=seconds)
    for number, line in enumerate(_lines(found), 1):
        sys.stdout.write(f"{line}\n")
        if number == limit:
            break


def _lines(found: "Iterable[pa.Table]") -> Iterator[str]:
    for rows in found:
        for row in rows.to_pylist():
            op, version, key, after = row["op"], format_lsn(Lsn(row["version"])), row["key"], row["after"]
            yield f'{{"op": "{op}", "version": "{version}", "key": {key or "null"}, "after": {after or "null"}}}'


def _lsn(text: str) -> Lsn | None:
    try:
        return parse_lsn(text) if text else None
    except ValueError as error:
        raise ConfigError(f"--until: {error}.") from None

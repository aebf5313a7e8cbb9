"""Output of the commands: colours and tables in a terminal, plain lines in a pipe, JSON on request."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdc.errors import MillraceError

if TYPE_CHECKING:
    from cdc.config.settings import Settings

OUT = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
ERR = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
"""In a pipe, lines are not wrapped."""

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", "-c", metavar="FILE", envvar="MILLRACE_CONFIG", help="The pipeline file.", show_default=True
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DEFAULT_CONFIG = Path("millrace.yaml")
_NUMBER = re.compile(r"-|-?[0-9][0-9,]*(\.[0-9]+)?")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.\d+)?(?:\+00:00|Z)")


def complete_target(context: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the sinks and tables of the pipeline file. Nothing for an invalid file."""
    return [name for name in (*complete_sink(context, ""), *_tables(context)) if name.startswith(incomplete)]


def complete_sink(context: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the sinks of the pipeline file."""
    settings = _settings(context)
    names = [sink.name for sink in settings.sinks] if settings else []
    return [name for name in names if name.startswith(incomplete)]


def complete_view(context: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the views of the pipeline file."""
    settings = _settings(context)
    names = [view.name for view in settings.views] if settings else []
    return [name for name in names if name.startswith(incomplete)]


def complete_table(context: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the tables of the pipeline file."""
    return [name for name in _tables(context) if name.startswith(incomplete)]


def _tables(context: typer.Context) -> list[str]:
    settings = _settings(context)
    return [str(table) for table in settings.tables] if settings else []


def _settings(context: typer.Context) -> "Settings | None":
    from cdc.service.daemon.process import settings_from

    try:
        return settings_from(Path(context.params.get("config") or DEFAULT_CONFIG))
    except MillraceError:
        return None


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, default=str, ensure_ascii=False) + "\n")


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table in a terminal; tab-separated lines in a pipe."""
    if not OUT.is_terminal:
        for row in rows:
            sys.stdout.write("\t".join(str(cell) for cell in row) + "\n")
        return
    lines = [[_short(str(cell)) for cell in row] for row in rows]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, cells in zip_longest(headings, zip(*lines, strict=True), fillvalue=()):
        numbers = bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells if cell)
        table.add_column(str(heading), overflow="fold", justify="right" if numbers else "left")
    for line in lines:
        table.add_row(*map(Text, line))  # a key may contain what looks like markup
    OUT.print(table)


def _short(cell: str) -> str:
    """Shortens a time to seconds, and without the date if it is today. A pipe and JSON have the full time."""
    found = _TIME.fullmatch(cell)
    if found is None:
        return cell
    today = datetime.now(UTC).date().isoformat()
    return f"{found[2]}Z" if found[1] == today else f"{found[1]} {found[2]}Z"

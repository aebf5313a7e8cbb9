"""How the commands speak: colour and tables in a terminal, plain lines in a pipe, JSON where asked."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", envvar="MILLRACE_CONFIG", help="The pipeline file.", show_default=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DEFAULT_CONFIG = Path("millrace.yaml")


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, default=str, ensure_ascii=False) + "\n")


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people; tab-separated lines when nobody is looking."""
    if not OUT.is_terminal:
        for row in rows:
            sys.stdout.write("\t".join(str(cell) for cell in row) + "\n")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    OUT.print(table)


def section(facts: Mapping[str, object], name: str) -> Mapping[str, object]:
    """A nested object of a status file, empty if it is missing or something else."""
    found = facts.get(name)
    return found if isinstance(found, dict) else {}

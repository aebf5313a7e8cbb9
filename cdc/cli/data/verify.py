"""`verify`: compare the stores with the source."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json, print_table

if TYPE_CHECKING:
    from snapshots.verify.comparison import Differences


def verify(
    config: ConfigOption = DEFAULT_CONFIG,
    sink: Annotated[
        list[str] | None, typer.Option(metavar="SINK", help="Only this sink; may be repeated. Default: all.")
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE", help="Only this table, as schema.name; may be repeated. Default: all."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for a sink to catch up.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Compare the stores with the source, row by row.

    Works while the source and the stores change. Exit code 0 only if they are equal.

    Example: millrace verify --sink delta --table public.orders --json
    """
    from cdc.cli.progress import progress_display
    from cdc.service.daemon.process import settings_from
    from cdc.service.inspect.verification import differences

    settings = settings_from(config)
    with progress_display(quiet=as_json or not OUT.is_terminal) as show:
        found = list(differences(settings, tuple(sink or ()), tuple(table or ()), timeout, show))
    equal = all(item.equal for item in found)
    if as_json:
        print_json({"equal": equal, "tables": [item.facts() for item in found]})
    else:
        _show(found)
    if not equal:
        raise typer.Exit(1)


def _show(found: "Sequence[Differences]") -> None:
    headings = ("sink", "table", "rows", "verdict", "missing", "extra", "different")
    rows = []
    for item in found:
        verdict = "equal" if item.equal else "different"
        note = f"{verdict}, {item.undecided} undecided" if item.undecided else verdict
        rows.append((item.sink, item.table, item.rows, note, item.missing, item.extra, item.different))
    print_table(headings, rows)
    for item in found:
        for kind, keys in (item.examples or {}).items():
            OUT.print(f"{item.sink} {item.table} {kind}: {'; '.join(keys)}", markup=False)

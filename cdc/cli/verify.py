"""`verify`: prove that the stores equal the source."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Annotated

import typer

from cdc.cli.screen import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json, print_table
from cdc.config import Settings, SinkSettings, TableSettings
from cdc.errors import ConfigError, MillraceError
from cdc.model import Lsn, TableId, format_lsn
from snapshots.verify import Differences, verify_table


def verify(
    config: ConfigOption = DEFAULT_CONFIG,
    sink: Annotated[list[str] | None, typer.Option(help="This sink; may be repeated. Default: all.")] = None,
    table: Annotated[list[str] | None, typer.Option(help="schema.name; may be repeated. Default: all.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a sink to catch up.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Compare the source with the stores, row by row, also while they change. Exit code 0 only if they are equal.

    Example: millrace verify --sink delta --table public.orders --json
    """
    from cdc.service.part import settings_from

    settings = settings_from(config)
    found = list(differences(settings, tuple(sink or ()), tuple(table or ()), timeout))
    equal = all(item.equal for item in found)
    if as_json:
        print_json({"equal": equal, "tables": [item.facts() for item in found]})
    else:
        _show(found)
    if not equal:
        raise typer.Exit(1)


def differences(
    settings: Settings, sinks: Sequence[str], tables: Sequence[str], timeout: float
) -> Iterator[Differences]:
    """The outcome for every table of every chosen sink, one after the other."""
    from sinks import registry
    from sinks.context import SinkContext

    for chosen in _sinks(settings, sinks):
        with closing(registry.open_sink(chosen, SinkContext(settings.state))) as store:
            for captured in _tables(settings, chosen, tables):
                yield verify_table(settings.source, captured, store, _waiter(settings, chosen.name, timeout))


def _sinks(settings: Settings, asked: Sequence[str]) -> list[SinkSettings]:
    known = {sink.name: sink for sink in settings.sinks}
    for name in asked:
        if name not in known:
            raise ConfigError(f"No sink is called {name}.", f"Sinks: {', '.join(known)}.")
    return [sink for name, sink in known.items() if not asked or name in asked]


def _tables(settings: Settings, sink: SinkSettings, asked: Sequence[str]) -> list[TableSettings]:
    known = {table.name: table for table in settings.source.tables}
    for name in map(_parsed, asked):
        if name not in known:
            raise ConfigError(f"Table {name} is not captured.", f"Tables: {', '.join(map(str, known))}.")
    wanted = set(map(_parsed, asked)) or set(known)
    return [table for name, table in known.items() if name in wanted and (not sink.tables or name in sink.tables)]


def _parsed(text: str) -> TableId:
    try:
        return TableId.parse(text)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None


def _waiter(settings: Settings, sink: str, timeout: float) -> Callable[[Lsn], None]:
    from cdc.service.reached import Positions

    positions = Positions(settings)

    def wait(lsn: Lsn) -> None:
        deadline = time.monotonic() + timeout
        while positions.behind(lsn, [sink]):
            if time.monotonic() > deadline:
                raise MillraceError(
                    f"Sink {sink} did not reach {format_lsn(lsn)} in {timeout:g} s, so a comparison would be unfair.",
                    "See: millrace status",
                )
            time.sleep(0.05)

    return wait


def _show(found: Sequence[Differences]) -> None:
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

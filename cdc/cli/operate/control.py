"""`pause`, `resume`, `skip` and `reload`: control a running pipeline through its state folder."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import (
    DEFAULT_CONFIG,
    OUT,
    ConfigOption,
    JsonOption,
    complete_sink,
    complete_table,
    complete_target,
    print_json,
)
from cdc.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from cdc.config.settings import Settings
    from cdc.service.state.pauses import Paused

_ANSWER_SECONDS, _SAME_REFUSAL_SECONDS = 60.0, 5.0
_TABLES = "tables_outcome"
Facts = dict[str, object]

TargetArgument = Annotated[
    str, typer.Argument(help="A sink's name, or a table as schema.name.", autocompletion=complete_target)
]


def pause(target: TargetArgument, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Pause a sink or a table until it is resumed.

    A pause survives restarts, and nothing is lost. A paused sink stops after its present batch and keeps its position.
    A paused table is held back from every sink. Capture continues in either case: pending changes stay in the log, and
    the replication slot keeps advancing.

    Examples:

        millrace pause redis

        millrace pause public.orders
    """
    from cdc.service.state import pauses

    settings = _settings(config)
    _print(
        settings, pauses.pause(settings, target), as_json, f"{target} is paused. Resume it: millrace resume {target}"
    )


def resume(
    target: TargetArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: Annotated[
        str, typer.Option(metavar="SINK", help="For a table: only in this sink.", autocompletion=complete_sink)
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Resume a sink, or a paused, waiting or skipped table.

    Missed changes are applied in order. A table that waits because a store cannot take it is retried at once. The rows
    of a skipped table are removed from that store, and a backfill fills it again.

    Examples:

        millrace resume redis

        millrace resume public.orders

        millrace resume public.orders --sink delta
    """
    from cdc.service.state import pauses

    settings = _settings(config)
    where = f" in {sink}" if sink else ""
    _print(
        settings, pauses.resume(settings, target, sink), as_json, f"{target} is resumed{where}. See: millrace status"
    )


def skip(
    table: Annotated[str, typer.Argument(help="A table as schema.name.", autocompletion=complete_table)],
    sink: Annotated[str, typer.Option(metavar="SINK", help="The sink that skips it.", autocompletion=complete_sink)],
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Have one sink skip a table.

    From now on that sink drops the table's changes; the rows in its store stay unchanged. On resume these rows are
    removed, and a backfill reads the table again.

    Example: millrace skip public.orders --sink delta
    """
    from cdc.service.state import pauses

    settings = _settings(config)
    line = f"{sink} skips {table}. To refill it: millrace resume {table} --sink {sink}"
    _print(settings, pauses.skip(settings, table, sink), as_json, line)


def reload(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Reload the pipeline file while the pipeline runs.

    Adds, removes and changes tables and sinks; positions stay. Restarts only the parts that need it. An invalid file
    changes nothing, and its error is shown here.

    Example: millrace validate && millrace reload
    """
    from cdc.service.daemon import reload as requests
    from cdc.service.state import status

    settings = _settings(config)
    before = _outcome(status.read(settings.state, "daemon"))
    refused = _outcome(status.read(settings.state, "capture"), _TABLES)
    requests.request(settings.state)
    outcome = _wait_for(
        lambda: _outcome(status.read(settings.state, "daemon")), lambda found: found.get("at") != before.get("at")
    )
    if not outcome.get("ok"):
        raise ConfigError(f"The file was not used; everything runs as before. {outcome.get('message')}")
    tables = sorted(str(table.name) for table in settings.source.tables)
    _wait_for_tables(settings, tables, refused)
    if as_json:
        print_json(outcome)
    else:
        OUT.print(f"Reloaded: {outcome.get('message')}.", markup=False)


def _wait_for_tables(settings: "Settings", tables: list[str], refused: Facts) -> None:
    """Wait until capture follows these tables; raises its refusal. `refused` is an earlier one, still in the file."""
    from cdc.service.state import status

    later = time.monotonic() + _SAME_REFUSAL_SECONDS

    def answered(facts: Facts) -> bool:
        outcome = _outcome(facts, _TABLES)
        fresh = outcome != refused or time.monotonic() > later  # the same refusal may come again
        return not _follows_others(facts, tables) or (outcome.get("ok") is False and fresh)

    facts = _wait_for(lambda: status.read(settings.state, "capture"), answered)
    if _follows_others(facts, tables):
        outcome = _outcome(facts, _TABLES)
        raise ConfigError(f"The tables were not changed. {outcome.get('message')}", str(outcome.get("remedy", "")))


def _follows_others(facts: Facts, tables: list[str]) -> bool:
    """Whether capture follows other tables. While it starts it reports none, and will follow these."""
    captured = facts.get("captured")
    return isinstance(captured, list) and sorted(captured) != tables


def _wait_for(read: Callable[[], Facts], answered: Callable[[Facts], bool]) -> Facts:
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not answered(facts := read()):
        if time.monotonic() > deadline:
            raise MillraceError(f"The daemon did not answer in {_ANSWER_SECONDS:g} s.", "See: millrace status")
        time.sleep(0.05)
    return facts


def _settings(config: ConfigOption) -> "Settings":
    from cdc.service.daemon.process import settings_from

    return settings_from(config)


def _outcome(facts: Facts, name: str = "reload") -> Facts:
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def _print(settings: "Settings", paused: "Paused", as_json: bool, line: str) -> None:
    from cdc.service.daemon.reload import daemon_pid

    if as_json:
        print_json(paused.facts())
        return
    OUT.print(line, markup=False)
    if daemon_pid(settings.state) is None:
        OUT.print("The pipeline does not run now; this takes effect when it starts.")

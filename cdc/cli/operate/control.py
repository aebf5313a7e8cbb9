"""`pause`, `resume`, `skip` and `reload`: steering a pipeline that runs, through its state folder."""

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

_PATIENCE, _SOON = 60.0, 5.0
_TABLES = "tables_outcome"
Facts = dict[str, object]

TargetArgument = Annotated[
    str, typer.Argument(help="A sink's name, or a table as schema.name.", autocompletion=complete_target)
]


def pause(target: TargetArgument, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Let a sink or a table stand still until it is resumed.

    Also over restarts; nothing is lost. A sink stops after the batch in hand and keeps its position. A table is
    held back from every sink. Capture goes on in either case: the log keeps what waits, and the replication slot
    does not.

    Examples:

        millrace pause redis

        millrace pause public.orders
    """
    from cdc.service.state import pauses

    settings = _settings(config)
    _said(
        settings, pauses.pause(settings, target), as_json, f"{target} is paused. Let it go on: millrace resume {target}"
    )


def resume(
    target: TargetArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: Annotated[
        str, typer.Option(metavar="SINK", help="A table: only in this sink.", autocompletion=complete_sink)
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Let a paused sink or table go on where it stopped.

    What it missed is applied in order. A table that waits because a store cannot take it is tried again at once. One
    that was skipped is removed from that store and filled again by a backfill.

    Examples:

        millrace resume redis

        millrace resume public.orders

        millrace resume public.orders --sink delta
    """
    from cdc.service.state import pauses

    settings = _settings(config)
    where = f" in {sink}" if sink else ""
    _said(settings, pauses.resume(settings, target, sink), as_json, f"{target} goes on{where}. See: millrace status")


def skip(
    table: Annotated[str, typer.Argument(help="A table as schema.name.", autocompletion=complete_table)],
    sink: Annotated[
        str, typer.Option(metavar="SINK", help="The sink that goes on without it.", autocompletion=complete_sink)
    ],
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Have one sink go on without a table.

    Its changes are not kept for that sink any more, and its rows stay there as they are. When it is resumed, they are
    removed there, and a backfill brings what the source has then.

    Example: millrace skip public.orders --sink delta
    """
    from cdc.service.state import pauses

    settings = _settings(config)
    line = f"{sink} goes on without {table}. Have it filled again: millrace resume {table} --sink {sink}"
    _said(settings, pauses.skip(settings, table, sink), as_json, line)


def reload(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Have the running pipeline read its file again.

    Tables and sinks come, go and change; positions stay. Only the parts concerned start again. A file that is wrong
    changes nothing, and the reason is shown here.

    Example: millrace validate && millrace reload
    """
    from cdc.service.daemon import reload as requests
    from cdc.service.state import status

    settings = _settings(config)
    before = _outcome(status.read(settings.state, "daemon"))
    refused = _outcome(status.read(settings.state, "capture"), _TABLES)
    requests.request(settings.state)
    outcome = _awaited(
        lambda: _outcome(status.read(settings.state, "daemon")), lambda found: found.get("at") != before.get("at")
    )
    if not outcome.get("ok"):
        raise ConfigError(f"Not taken over; everything runs on as before. {outcome.get('message')}")
    tables = sorted(str(table.name) for table in settings.source.tables)
    _await_tables(settings, tables, refused)
    if as_json:
        print_json(outcome)
    else:
        OUT.print(f"Taken over: {outcome.get('message')}.", markup=False)


def _await_tables(settings: "Settings", tables: list[str], refused: Facts) -> None:
    """Until capture follows these tables; raises what it says against them. `refused` is what it said last time."""
    from cdc.service.state import status

    soon = time.monotonic() + _SOON

    def answered(facts: Facts) -> bool:
        said = _outcome(facts, _TABLES)
        fresh = said != refused or time.monotonic() > soon  # the same refusal may come again
        return not _follows_others(facts, tables) or (said.get("ok") is False and fresh)

    facts = _awaited(lambda: status.read(settings.state, "capture"), answered)
    if _follows_others(facts, tables):
        said = _outcome(facts, _TABLES)
        raise ConfigError(f"The tables were not taken over. {said.get('message')}", str(said.get("remedy", "")))


def _follows_others(facts: Facts, tables: list[str]) -> bool:
    """Whether capture follows other tables. While it starts it says nothing, and will read these."""
    captured = facts.get("captured")
    return isinstance(captured, list) and sorted(captured) != tables


def _awaited(ask: Callable[[], Facts], answered: Callable[[Facts], bool]) -> Facts:
    deadline = time.monotonic() + _PATIENCE
    while not answered(facts := ask()):
        if time.monotonic() > deadline:
            raise MillraceError(f"The daemon did not answer in {_PATIENCE:g} s.", "See: millrace status")
        time.sleep(0.05)
    return facts


def _settings(config: ConfigOption) -> "Settings":
    from cdc.service.daemon.process import settings_from

    return settings_from(config)


def _outcome(facts: Facts, name: str = "reload") -> Facts:
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def _said(settings: "Settings", paused: "Paused", as_json: bool, line: str) -> None:
    from cdc.service.daemon.reload import daemon_pid

    if as_json:
        print_json(paused.facts())
        return
    OUT.print(line, markup=False)
    if daemon_pid(settings.state) is None:
        OUT.print("The pipeline does not run now; it will keep to this when it does.")

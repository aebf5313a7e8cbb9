"""`why`: the history of one row."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, complete_table, print_json, print_table

if TYPE_CHECKING:
    from cdc.service.inspect.why import EventOutcome, RowHistory

_OPS = {
    "c": "inserted",
    "u": "updated",
    "d": "deleted",
    "r": "read by a snapshot",
    "t": "truncated",
    "p": "removed with its partition",
}


def why(
    table: Annotated[str, typer.Argument(help="A table as schema.name.", autocompletion=complete_table)],
    key: Annotated[str, typer.Argument(help='The key as a JSON object: {"id":42}')],
    config: ConfigOption = DEFAULT_CONFIG,
    seconds: Annotated[float, typer.Option(min=1, help="Time limit for the search, in seconds.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Show the events of a row and their outcome in each store.

    Also the version that each store has now. Shows no row values.

    Example: millrace why public.orders '{"id":42}'
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.inspect.why import row_history
    from cdc.service.observe.positions import Positions, open_log

    settings = settings_from(config)
    reader = open_log(settings)
    positions = Positions(settings, reader).by_sink()
    found = row_history(settings, reader, positions, table, key, seconds=seconds)
    if as_json:
        print_json(asdict(found))
    else:
        _print(found)


def _print(history: "RowHistory") -> None:
    sinks = list(history.stored)
    if not history.events:
        OUT.print("The log has no event of this key.")
    rows = [
        (
            _OPS.get(one.event.op, one.event.op),
            one.event.commit_ts,
            f"{one.event.xid} · {one.event.ordinal}",
            one.event.commit_lsn,
            one.event.version,
            one.entry,
            *(_outcome(one, sink) for sink in sinks),
        )
        for one in history.events
    ]
    if rows:
        print_table(("what", "at", "transaction", "commit", "version", "log entry", *sinks), rows)
    stored = [(name, one.state, one.version, one.place or one.trouble) for name, one in history.stored.items()]
    print_table(("store", "state", "version", "place"), stored)


def _outcome(one: "EventOutcome", sink: str) -> str:
    outcome, batch = one.sinks[sink], one.batches[sink]
    if outcome != "applied":
        return outcome
    if batch is None:
        return "applied, batch not recorded"
    number = str(batch.first) if batch.first == batch.last else f"{batch.first} to {batch.last}"
    return f"applied, batch {number}, {batch.at}"

"""`why`: the way of one row through the system."""

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
    table: Annotated[str, typer.Argument(help="schema.name", autocompletion=complete_table)],
    key: Annotated[str, typer.Argument(help='The key as a JSON object: {"id":42}')],
    config: ConfigOption = DEFAULT_CONFIG,
    seconds: Annotated[float, typer.Option(min=1, help="How long to search the log.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Show every event of a row, what became of it in each store, and what each store holds now. No values.

    Example: millrace why public.orders '{"id":42}'
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.inspect.why import story
    from cdc.service.observe.positions import Positions, open_log

    settings = settings_from(config)
    reader = open_log(settings)
    places = Positions(settings, reader).places()
    told = story(settings, reader, places, table, key, seconds=seconds)
    if as_json:
        print_json(asdict(told))
    else:
        _print(told)


def _print(told: "RowHistory") -> None:
    sinks = list(told.stored)
    if not told.events:
        OUT.print("The log holds no event of this key.")
    rows = [
        (
            _OPS.get(one.event.op, one.event.op),
            one.event.commit_ts,
            f"{one.event.xid} · {one.event.ordinal}",
            one.event.commit_lsn,
            one.event.version,
            one.entry,
            *(_fate(one, sink) for sink in sinks),
        )
        for one in told.events
    ]
    if rows:
        print_table(("what", "at", "transaction", "commit", "version", "log entry", *sinks), rows)
    held = [(name, one.state, one.version, one.place or one.trouble) for name, one in told.stored.items()]
    print_table(("store", "holds", "version", "place"), held)


def _fate(one: "EventOutcome", sink: str) -> str:
    fate, batch = one.sinks[sink], one.batches[sink]
    if fate != "applied":
        return fate
    if batch is None:
        return "applied, batch not recorded"
    number = str(batch.first) if batch.first == batch.last else f"{batch.first} to {batch.last}"
    return f"applied, batch {number}, {batch.at}"

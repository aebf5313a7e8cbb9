"""`dlq`: changes that a store refused, looked at and dealt with. Works on the state folder; opens no store."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from cdc.cli.screen import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json, print_table
from cdc.config import Settings
from cdc.errors import ConfigError
from cdc.model import Lsn, format_lsn
from sinks.dead_letters import DeadLetters, Letter

app = typer.Typer(
    help="Changes that a store refused: look at them, try them again, give them up.", no_args_is_help=True
)

SinkOption = Annotated[str, typer.Option("--sink", help="Only this sink.")]
TableOption = Annotated[str, typer.Option("--table", help="Only this table, as schema.name.")]
KeyOption = Annotated[str, typer.Option("--key", help="Only this key, as `dlq list` shows it.")]


@app.command("list")
def list_letters(
    config: ConfigOption = DEFAULT_CONFIG, sink: SinkOption = "", table: TableOption = "", as_json: JsonOption = False
) -> None:
    """List the parked changes with their reasons; keys are shown, other values are not.

    Example: millrace dlq list --sink opensearch
    """
    found = [(name, letter) for name, letters in _boxes(config, sink) for letter in letters.list(table or None)]
    if as_json:
        print_json([_summary(name, letter) for name, letter in found])
        return
    if not found:
        OUT.print("No dead letters.")
        return
    rows = [list(_summary(name, letter).values()) for name, letter in found]
    print_table(["sink", "table", "key", "lsn", "reason", "attempts", "parked at"], rows)


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="The key, as `dlq list` shows it.")],
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = "",
    table: TableOption = "",
) -> None:
    """Show one parked change with its values, as JSON.

    Example: millrace dlq show '{"id":42}' --table public.orders
    """
    found = [
        {"sink": name, **asdict(letter)}
        for name, letters in _boxes(config, sink)
        for letter in letters.list(table or None)
        if letter.key == key
    ]
    if not found:
        raise ConfigError("There is no dead letter with that key.", "See: millrace dlq list")
    print_json(found)


@app.command()
def retry(
    config: ConfigOption = DEFAULT_CONFIG, sink: SinkOption = "", table: TableOption = "", key: KeyOption = ""
) -> None:
    """Have the running pipeline try parked changes again, within a second or two.

    Example: millrace dlq retry --sink opensearch --table public.orders
    """
    count = sum(letters.ask_retry(table or None, key or None) for _, letters in _boxes(config, sink))
    OUT.print(f"{count} change(s) will be tried again by the running pipeline; see: millrace dlq list")


@app.command()
def drop(
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = "",
    table: TableOption = "",
    key: KeyOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Give parked changes up: the store lacks them until their keys change again.

    Example: millrace dlq drop --sink opensearch --key '{"id":42}'
    """
    boxes = list(_boxes(config, sink))
    wanted = [letter for _, letters in boxes for letter in letters.list(table or None) if not key or letter.key == key]
    if wanted and not yes:
        typer.confirm(f"Give up {len(wanted)} change(s) for good?", abort=True)
    count = sum(letters.drop(table or None, key or None) for _, letters in boxes)
    OUT.print(f"{count} change(s) given up.")


def _boxes(config: "ConfigOption", sink: str) -> Iterator[tuple[str, DeadLetters]]:
    from cdc.service.part import settings_from

    settings: Settings = settings_from(config)
    names = [found.name for found in settings.sinks]
    if sink and sink not in names:
        raise ConfigError(f"There is no sink {sink!r}.", f"Sinks of this pipeline: {', '.join(names) or 'none'}.")
    for name in names:
        if not sink or name == sink:
            yield name, DeadLetters(settings.state / "dead-letters" / name)


def _summary(sink: str, letter: Letter) -> dict[str, object]:
    return {
        "sink": sink,
        "table": letter.table,
        "key": letter.key,
        "lsn": format_lsn(Lsn(letter.version)),
        "reason": letter.reason,
        "attempts": letter.attempts,
        "parked_at": letter.parked_at.isoformat(timespec="seconds"),
    }

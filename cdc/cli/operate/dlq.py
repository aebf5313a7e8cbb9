"""`dlq`: changes that a store refused, looked at and dealt with. Works on the state folder; opens no store."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json, print_table
from cdc.config.settings import Settings
from cdc.errors import ConfigError
from cdc.json_text.members import members, unquote
from cdc.model import Lsn, format_lsn
from sinks.apply.dead_letters import DeadLetter, DeadLetters

app = typer.Typer(help="Changes that a store refused: see, retry or drop them.", no_args_is_help=True)

SinkOption = Annotated[str, typer.Option("--sink", metavar="SINK", help="Only this sink.")]
TableOption = Annotated[str, typer.Option("--table", metavar="TABLE", help="Only this table, as schema.name.")]
KeyOption = Annotated[str, typer.Option("--key", metavar="KEY", help="Only this key, as `dlq list` shows it.")]


@app.command("list")
def list_letters(
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = "",
    table: TableOption = "",
    as_json: JsonOption = False,
) -> None:
    """List the parked changes with their reasons.

    Keys are shown, other values are not.

    Example: millrace dlq list --sink opensearch
    """
    found = [(name, letter) for name, _, letter in _chosen(config, sink, table, "")]
    if as_json:
        print_json([_summary(name, letter) for name, letter in found])
        return
    if not found:
        OUT.print("No dead letters.")
        return
    rows = [list(_summary(name, letter).values()) for name, letter in found]
    print_table(["sink", "table", "key", "op", "lsn", "reason", "attempts", "parked at"], rows)


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="The key, as `dlq list` shows it; of one column, its value will do.")],
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = "",
    table: TableOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show one parked change with its values.

    Example: millrace dlq show '{"id":42}' --table public.orders
    """
    found = [
        {"sink": name, **asdict(letter), "lsn": format_lsn(Lsn(letter.version))}
        for name, _, letter in _chosen(config, sink, table, key)
    ]
    if as_json:
        print_json(found)
        return
    for letter in found:
        print_table(("", ""), [(name.replace("_", " "), _plain(value)) for name, value in letter.items()])


@app.command()
def retry(
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = "",
    table: TableOption = "",
    key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Have the running pipeline try parked changes again.

    It does so within a second or two.

    Example: millrace dlq retry --sink opensearch --table public.orders
    """
    chosen = list(_chosen(config, sink, table, key))
    count = sum(letters.ask_retry(letter.table, letter.key) for _, letters, letter in chosen)
    if as_json:
        print_json({"retried": count})
        return
    OUT.print(f"{count} change(s) will be tried again by the running pipeline; see: millrace dlq list")


@app.command()
def drop(
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = "",
    table: TableOption = "",
    key: KeyOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Give parked changes up.

    The store lacks them until their keys change again.

    Example: millrace dlq drop --sink opensearch --key '{"id":42}'
    """
    chosen = list(_chosen(config, sink, table, key))
    if chosen and not yes:
        typer.confirm(f"Give up {len(chosen)} change(s) for good?", abort=True, err=as_json)
    count = sum(letters.drop(letter.table, letter.key) for _, letters, letter in chosen)
    if as_json:
        print_json({"dropped": count})
        return
    OUT.print(f"{count} change(s) given up.")


def _chosen(config: "ConfigOption", sink: str, table: str, key: str) -> Iterator[tuple[str, DeadLetters, DeadLetter]]:
    """The letters that are meant, with their sinks; raises ConfigError where a key was named and has none."""
    found = False
    for name, letters in _boxes(config, sink):
        for letter in letters.list(table or None):
            if not key or _is(letter.key, key):
                found = True
                yield name, letters, letter
    if key and not found:
        raise ConfigError(
            "There is no dead letter with that key.", "See: millrace dlq list. A shell takes quotes off: '{\"id\":42}'."
        )


def _is(key: str, asked: str) -> bool:
    """Whether a key is the asked one, also with spaces in it, or named by the value of its one column."""
    values = list(members(key).values())
    if len(values) == 1 and asked == unquote(values[0]):
        return True
    try:
        return members(asked) == members(key)
    except ValueError:
        return False


def _boxes(config: "ConfigOption", sink: str) -> Iterator[tuple[str, DeadLetters]]:
    from cdc.service.daemon.process import settings_from

    settings: Settings = settings_from(config)
    names = [found.name for found in settings.sinks]
    if sink and sink not in names:
        raise ConfigError(f"There is no sink {sink!r}.", f"Sinks of this pipeline: {', '.join(names) or 'none'}.")
    for name in names:
        if not sink or name == sink:
            yield name, DeadLetters(settings.state / "dead-letters" / name)


def _summary(sink: str, letter: DeadLetter) -> dict[str, object]:
    return {
        "sink": sink,
        "table": letter.table,
        "key": letter.key,
        "op": letter.op,
        "lsn": format_lsn(Lsn(letter.version)),
        "reason": letter.reason,
        "attempts": letter.attempts,
        "parked_at": letter.parked_at.isoformat(timespec="seconds"),
    }


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)

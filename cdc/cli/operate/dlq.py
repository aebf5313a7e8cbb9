"""`dlq`: show, retry and delete dead letters, the changes that a store refused. Opens no store."""

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

app = typer.Typer(help="Show, retry or delete dead letters (refused changes).", no_args_is_help=True)

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
    """List dead letters with their reasons.

    Shows keys, but no other values.

    Example: millrace dlq list --sink opensearch
    """
    found = [(name, dead_letter) for name, _, dead_letter in _chosen(config, sink, table, "")]
    if as_json:
        print_json([_summary(name, dead_letter) for name, dead_letter in found])
        return
    if not found:
        OUT.print("No dead letters.")
        return
    rows = [list(_summary(name, dead_letter).values()) for name, dead_letter in found]
    print_table(["sink", "table", "key", "op", "lsn", "reason", "attempts", "since"], rows)


@app.command()
def show(
    key: Annotated[
        str, typer.Argument(help="The key, as `dlq list` shows it; for a single-column key its value is enough.")
    ],
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = "",
    table: TableOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter with its values.

    Example: millrace dlq show '{"id":42}' --table public.orders
    """
    found = [
        {"sink": name, **asdict(dead_letter), "lsn": format_lsn(Lsn(dead_letter.version))}
        for name, _, dead_letter in _chosen(config, sink, table, key)
    ]
    if as_json:
        print_json(found)
        return
    for facts in found:
        print_table(("", ""), [(name.replace("_", " "), _plain(value)) for name, value in facts.items()])


@app.command()
def retry(
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = "",
    table: TableOption = "",
    key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Have the running pipeline retry dead letters.

    It does so within a second or two.

    Example: millrace dlq retry --sink opensearch --table public.orders
    """
    chosen = list(_chosen(config, sink, table, key))
    count = sum(file.ask_retry(one.table, one.key) for _, file, one in chosen)
    if as_json:
        print_json({"retried": count})
        return
    OUT.print(f"The running pipeline will retry {count} dead letter(s). See: millrace dlq list")


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
    """Delete dead letters permanently.

    The store lacks these changes until their keys change again.

    Example: millrace dlq drop --sink opensearch --key '{"id":42}'
    """
    chosen = list(_chosen(config, sink, table, key))
    if chosen and not yes:
        typer.confirm(f"Delete {len(chosen)} dead letter(s) permanently?", abort=True, err=as_json)
    count = sum(file.drop(one.table, one.key) for _, file, one in chosen)
    if as_json:
        print_json({"dropped": count})
        return
    OUT.print(f"Deleted {count} dead letter(s).")


def _chosen(config: "ConfigOption", sink: str, table: str, key: str) -> Iterator[tuple[str, DeadLetters, DeadLetter]]:
    """The chosen dead letters, with sink and file; raises ConfigError for a key without one."""
    found = False
    for name, file in _files(config, sink):
        for dead_letter in file.list(table or None):
            if not key or _matches(dead_letter.key, key):
                found = True
                yield name, file, dead_letter
    if key and not found:
        raise ConfigError(
            "There is no dead letter with that key.", "See: millrace dlq list. Quote the key: '{\"id\":42}'."
        )


def _matches(key: str, asked: str) -> bool:
    """Whether the user means this key: as JSON, with or without spaces, or as the value of its only column."""
    values = list(members(key).values())
    if len(values) == 1 and asked == unquote(values[0]):
        return True
    try:
        return members(asked) == members(key)
    except ValueError:
        return False


def _files(config: "ConfigOption", sink: str) -> Iterator[tuple[str, DeadLetters]]:
    from cdc.service.daemon.process import settings_from

    settings: Settings = settings_from(config)
    names = [found.name for found in settings.sinks]
    if sink and sink not in names:
        raise ConfigError(f"There is no sink {sink!r}.", f"Sinks of this pipeline: {', '.join(names) or 'none'}.")
    for name in names:
        if not sink or name == sink:
            yield name, DeadLetters(settings.state / "dead-letters" / name)


def _summary(sink: str, dead_letter: DeadLetter) -> dict[str, object]:
    return {
        "sink": sink,
        "table": dead_letter.table,
        "key": dead_letter.key,
        "op": dead_letter.op,
        "lsn": format_lsn(Lsn(dead_letter.version)),
        "reason": dead_letter.reason,
        "attempts": dead_letter.attempts,
        "parked_at": dead_letter.parked_at.isoformat(timespec="seconds"),
    }


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)

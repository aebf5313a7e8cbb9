"""The options of the format `millrace`. Pure.

Unknown options are errors, so that a typo never disables one silently. Spark gives their names in any case.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar

from cdc.errors import ConfigError
from cdc.model import Lsn, TableId, parse_lsn

_PAGE = "Every option: docs/spark-reader.md."
_CONSUMER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Edge(StrEnum):
    """An end of the log."""

    START = "start"
    NOW = "now"


Point: TypeAlias = Edge | int | datetime
"""A place in the log as a user names it: an end of it, an LSN or a time."""


class Preimages(StrEnum):
    """The row before an update or a delete: the source sends it only under replica identity FULL."""

    AVAILABLE = "available"
    REQUIRED = "required"
    NONE = "none"


class Truncates(StrEnum):
    """What to do about changes that remove rows without naming them."""

    FAIL = "fail"
    EMIT = "emit"
    SKIP = "skip"


class SchemaChanges(StrEnum):
    """What to do when the table gains or changes columns while a query runs."""

    FAIL = "fail"
    IGNORE = "ignore"


class Mode(StrEnum):
    """What to do with a value that does not fit the type of its column: Spark's names."""

    FAILFAST = "failfast"
    PERMISSIVE = "permissive"


_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class RowRules:
    """What the tasks do with changes that do not simply become rows."""

    preimages: Preimages = Preimages.AVAILABLE
    truncates: Truncates = Truncates.FAIL
    mode: Mode = Mode.FAILFAST


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of one DataFrame."""

    pipeline: Path
    table: TableId
    columns: tuple[str, ...] = ()
    begin: Point = Edge.START
    until: Point = Edge.NOW
    limit: int = 0
    partitions: int = 0
    consumer: str = ""
    schema_changes: SchemaChanges = SchemaChanges.FAIL
    rules: RowRules = RowRules()


NAMES = (
    "pipeline",
    "table",
    "columns",
    "from",
    "until",
    "maxChangesPerTrigger",
    "maxPartitions",
    "consumer",
    "preimages",
    "truncates",
    "schemaChanges",
    "mode",
)
_STREAM_ONLY = ("maxChangesPerTrigger", "consumer")
_BATCH_ONLY = ("until",)


def parse(options: Mapping[str, str]) -> ReadOptions:
    """Read the options. Raises ConfigError, which names the option and a similar one."""
    known = {name.lower(): name for name in NAMES}
    given = {known.get(name.lower(), name): value for name, value in options.items()}
    for name in given:
        if name not in NAMES:
            raise ConfigError(f"Option {name!r} of the format millrace is not known{_nearest(name)}", _PAGE)
    return ReadOptions(
        pipeline=Path(_required(given, "pipeline", "the path of the pipeline file, for instance millrace.yaml")),
        table=_table(_required(given, "table", "the table as schema.name, for instance public.orders")),
        columns=tuple(filter(None, (name.strip() for name in given.get("columns", "").split(",")))),
        begin=_point("from", given.get("from", Edge.START)),
        until=_point("until", given.get("until", Edge.NOW)),
        limit=_count("maxChangesPerTrigger", given),
        partitions=_count("maxPartitions", given),
        consumer=_consumer(given.get("consumer", "")),
        schema_changes=_choice(SchemaChanges, "schemaChanges", given, SchemaChanges.FAIL),
        rules=RowRules(
            _choice(Preimages, "preimages", given, Preimages.AVAILABLE),
            _choice(Truncates, "truncates", given, Truncates.FAIL),
            _choice(Mode, "mode", given, Mode.FAILFAST),
        ),
    )


def require_streamed(options: Mapping[str, str]) -> None:
    """Raise ConfigError if an option is only for batch reads."""
    _refuse(options, _BATCH_ONLY, "a stream does not end: use spark.read, or the trigger availableNow")


def require_batch(options: Mapping[str, str]) -> None:
    """Raise ConfigError if an option is only for streams."""
    _refuse(options, _STREAM_ONLY, "a batch read has no trigger and keeps no position: use spark.readStream")


def _refuse(options: Mapping[str, str], names: Iterable[str], why: str) -> None:
    given = {name.lower() for name in options}
    for name in names:
        if name.lower() in given:
            raise ConfigError(f"Option {name!r} of the format millrace is not allowed here.", f"It is refused: {why}.")


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), [each.lower() for each in NAMES], n=1, cutoff=0.5)
    return "; did you mean " + repr(next(each for each in NAMES if each.lower() == close[0])) + "?" if close else "."


def _required(given: Mapping[str, str], name: str, what: str) -> str:
    if not given.get(name):
        raise ConfigError(f"Option {name!r} of the format millrace is missing.", f"Give {what}.")
    return given[name]


def _table(text: str) -> TableId:
    try:
        return TableId.parse(text)
    except ValueError as error:
        raise ConfigError(f"Option 'table' of the format millrace: {error}.", _PAGE) from None


def _count(name: str, given: Mapping[str, str]) -> int:
    text = given.get(name, "0")
    if not text.isdecimal():
        raise ConfigError(f"Option {name!r} of the format millrace is not a whole number: {text!r}.", _PAGE)
    return int(text)


def _consumer(name: str) -> str:
    if name and not _CONSUMER.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid consumer name.", "Use letters, digits, _, . and -.")
    return name


def _choice(kind: type[_Choice], name: str, given: Mapping[str, str], default: _Choice) -> _Choice:
    text = given.get(name, default).lower()
    if text not in {each.value for each in kind}:
        allowed = ", ".join(each.value for each in kind)
        raise ConfigError(f"Option {name!r} of the format millrace must be one of {allowed}.", _PAGE)
    return kind(text)


def _point(name: str, text: str) -> Point:
    edges = {each.value for each in Edge} if name == "from" else {Edge.NOW.value}
    if text.lower() in edges:
        return Edge(text.lower())
    if "/" in text:
        return _lsn(name, text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        wanted = f"{', '.join(sorted(edges))}, an LSN such as 16/B374D848, or a time such as 2026-03-01T12:00:00Z"
        raise ConfigError(f"Option {name!r} of the format millrace is {text!r}.", f"Give {wanted}.") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _lsn(name: str, text: str) -> Lsn:
    try:
        return parse_lsn(text)
    except ValueError as error:
        raise ConfigError(f"Option {name!r} of the format millrace: {error}.", _PAGE) from None

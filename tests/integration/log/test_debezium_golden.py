"""The same statements through our capture and through Debezium: every difference is one that we chose.

DIFFERENCES is that list; docs/debezium-differences.md gives the reasons, and a test holds the two together.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import cdc.log
from cdc.log.kafka.envelope.encode import Origin, encode
from tests.corpus import golden
from tests.fix_capture import Rig

Turn = Callable[[Any, Any], Any]
"""From the golden value, and the one with ISO times, to ours."""
ABSENT = "<absent>"
PLACEHOLDER = "__debezium_unavailable_value"


def same_list(turn: Turn) -> Turn:
    return lambda value, iso: [turn(*pair) for pair in zip(value, iso, strict=True)]


def one_of(known: dict[Any, str]) -> Turn:
    return lambda value, _iso: known[value]


def embedded(value: Any, _iso: Any) -> Any:
    return json.loads(value)


def zoneless(_value: Any, iso: Any) -> str:
    return str(iso.removesuffix("Z"))


def unpacked(value: Any, _iso: Any) -> str:
    return base64.b64decode(value).decode()


def numeric(value: Any, _iso: Any) -> Any:
    words = {"NAN": "NaN", "POSITIVE_INFINITY": "Infinity", "NEGATIVE_INFINITY": "-Infinity"}
    if value in words:
        return words[value]
    return Decimal(value) if "." in value else int(value)


def zoned(value: Any, _iso: Any) -> str:
    return re.sub(r"\.?0+Z$", "Z", value)


def geometry(value: Any, _iso: Any) -> str:
    return base64.b64decode(value).decode().replace(".0", "")


def interval(value: Any, _iso: Any) -> str:
    short = re.sub(r"(?<![\d.])-?0[YMDHMS]", "", value).removesuffix("T")
    return {"P": "PT0S"}.get(short, short)


def hstore(value: Any, _iso: Any) -> str:
    quoted = ('"' + key + '"=>' + ("NULL" if item is None else f'"{item}"') for key, item in value.items())
    return ", ".join(quoted)


def point(value: Any, _iso: Any) -> str:
    numbers = (f"{float(value[axis]):g}" for axis in "xy")
    return "(" + ",".join(numbers) + ")"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that we do otherwise, for these columns (table.column), and how ours follows from Debezium's."""

    name: str
    columns: str
    turn: Turn


DIFFERENCES = (
    Difference("numeric is a number", r"all_types\.c_num\w*|bench_orders\.amount|comp_pk\.v|evolve\.extra", numeric),
    Difference("numeric is a number", r"all_types\.c_num_arr", same_list(numeric)),
    Difference("numeric NaN and infinities", r"special_num\.(n|n102)", numeric),
    Difference("money is text", r"all_types\.c_money", one_of({"1234.56": "$1,234.56", "-0.01": "-$0.01"})),
    Difference("json is embedded", r"all_types\.c_jsonb?|bench_orders\.attrs|toasted\.j", embedded),
    Difference("json is embedded", r"all_types\.c_jsonb_arr", same_list(embedded)),
    Difference("no zone on what has none", r".*\.(c_date|c_time\d?|c_ts\d?|due|d|ts)", zoneless),
    Difference("no zone on what has none", r"all_types\.c_(date|time|ts)_arr", same_list(zoneless)),
    Difference("no padding of seconds", r"all_types\.c_dflt_ts|bench_orders\.updated_at", zoned),
    Difference("timetz keeps its zone", r"all_types\.c_timetz",
               one_of({"11:14:15.123456Z": "13:14:15.123456+02", "11:59:59.999999Z": "23:59:59.999999-12"})),
    Difference("24:00 stays", r"all_types\.c_time", one_of({86400000: "24:00:00"})),
    Difference("infinite and BC times are Postgres's", r"special_time\.(d|ts)",
               lambda _, iso: {"+294247-01-10T04:00:25.2Z": "infinity", "-5877611-06-21Z": "infinity",
                               "-5877611-06-22Z": "-infinity", "-0043-03-15Z": "0044-03-15 BC",
                               "-0043-03-15T00:00:00Z": "0044-03-15T00:00:00 BC"}[iso]),
    Difference("intervals are short", r"all_types\.c_interval|special_time\.iv", interval),
    Difference("bits are text", r"all_types\.c_bit1", lambda value, _: str(int(value))),
    Difference("bits are text", r"all_types\.c_bit8", lambda value, _: f"{base64.b64decode(value)[0]:08b}"),
    Difference("bits are text", r"all_types\.c_varbit", lambda value, _: f"{base64.b64decode(value)[0]:b}"),
    Difference("unknown types are text", r"all_types\.c_(comp|tsquery|lsn)", unpacked),
    Difference("geometry is text", r"all_types\.c_(line|lseg|box|path|polygon|circle)", geometry),
    Difference("geometry is text", r"all_types\.c_point", point),
    Difference("hstore is text", r"all_types\.c_hstore", hstore),
    Difference("generated columns are not sent", r"all_types\.c_gen", lambda _value, _iso: ABSENT),
    Difference("NULL stays NULL beside a default", r"all_types\.c_dflt(_ts)?", lambda _value, _iso: None),
    Difference("unchanged columns are absent", r"toasted\.[tbaj]", lambda _value, _iso: ABSENT),
)  # fmt: skip

OPERATIONS = {
    "nopk": (["r", "c", "d", "c", "d", "c", "c"], "a row without a key is its own key"),
    "parted": (["r", "c", "d", "c"], "partitions are their table"),
    "parted_1": ([], "partitions are their table"),
    "parted_2": ([], "partitions are their table"),
}
"""Tables whose sequence of operations differs, and ours."""

ALSO = ("deletes show their key only", "key columns are in table order", "truncates have the key null")


def captured(rig: Rig) -> dict[str, list[dict[str, Any]]]:
    """Our envelopes of the golden statements, by table."""
    rig.database.execute(golden.setup())
    with rig.database.connect() as connection:
        found = connection.execute(
            "select tablename from pg_tables where schemaname = 'smp' and tablename not like 'parted\\__'"
        ).fetchall()
    rig.source["tables"] = [{"name": f"smp.{name}", "snapshot": "initial"} for (name,) in found]
    rig.begin()
    with rig.database.connect(autocommit=False) as connection:
        for _, parts in golden.statements():
            for statement in parts:
                connection.execute(statement.encode())
            connection.commit()
    with rig.following() as following:
        following.reaches(rig.now())
    tables: dict[str, list[dict[str, Any]]] = {}
    reader = cdc.log.open_reader(rig.settings)
    for part in reader.read(reader.start()):
        for messages in encode(part.rows, Origin("smp", "bench"), datetime.now(UTC)):
            for key, value in zip(messages.keys.to_pylist(), messages.values.to_pylist(), strict=True):
                envelope = json.loads(value, parse_float=Decimal)
                name = envelope["source"]["table"]
                tables.setdefault(name, []).append({"key": json.loads(key), "value": envelope})
    return tables


def expected() -> dict[str, list[dict[str, Any]]]:
    tables: dict[str, list[dict[str, Any]]] = {}
    for message in golden.messages():
        if message["kind"] != "tombstone":
            tables.setdefault(message["value"]["source"]["table"], []).append(message)
    return tables


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 0 is 0.0, but neither is false nor "0"."""
    kinds = {int: Decimal}
    return bool(one == other) and kinds.get(type(one), type(one)) is kinds.get(type(other), type(other))


def differences(place: str, ours: Any, theirs: Any, iso: Any) -> Iterator[str]:
    """The names of the differences that explain this value; nothing if it is equal. Fails if nothing explains it."""
    if same(ours, theirs):
        return
    for difference in DIFFERENCES:
        if not re.fullmatch(difference.columns, place):
            continue
        try:
            wanted = difference.turn(theirs, iso)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            continue
        if same(wanted, ours):
            yield difference.name
            return
    pytest.fail(f"{place}: Debezium {theirs!r} (iso {iso!r}), ours {ours!r}")


def compare_images(table: str, ours: dict[str, Any], message: dict[str, Any]) -> Iterator[str]:
    theirs = message["value"]["after"]
    iso = message.get("iso", {}).get("after") or {}
    for name in {**theirs, **ours}:
        values = (ours.get(name, ABSENT), theirs.get(name, ABSENT), iso.get(name, ABSENT))
        yield from differences(f"{table}.{name}", *values)


def compare(table: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Iterator[str]:
    assert [row["value"]["op"] for row in ours] == [message["value"]["op"] for message in theirs], table
    for row, message in zip(ours, theirs, strict=True):
        assert row["key"] == message["key"], table
        if row["value"]["op"] == "t":
            yield "truncates have the key null"
        if list(row["key"] or ()) != list(message["key"] or ()):
            yield "key columns are in table order"
        if row["value"]["after"] is not None:
            yield from compare_images(table, row["value"]["after"], message)
        else:
            assert message["value"]["after"] is None
        if row["value"]["op"] == "d" and row["value"]["before"] != message["value"]["before"]:
            assert row["value"]["before"] == row["key"]
            yield "deletes show their key only"


def test_every_difference_from_debezium_is_a_chosen_one(rig: Rig) -> None:
    ours, theirs = captured(rig), expected()
    used: set[str] = set()
    for table in sorted(theirs):
        if table in OPERATIONS:
            operations, reason = OPERATIONS[table]
            assert [row["value"]["op"] for row in ours.get(table, [])] == operations, table
            used.add(reason)
        else:
            used |= set(compare(table, ours[table], theirs[table]))
    assert used == _names(), "a listed difference that is none"


def _names() -> set[str]:
    return {difference.name for difference in DIFFERENCES} | {reason for _, reason in OPERATIONS.values()} | set(ALSO)


def test_every_difference_has_its_reason_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "debezium-differences.md").read_text()
    listed = set(re.findall(r"^### (.+)$", page, re.MULTILINE))
    assert listed == _names()

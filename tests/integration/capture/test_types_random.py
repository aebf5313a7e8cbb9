"""Random values through a real Postgres: what Python put in is what the JSON gives back, by stream and by snapshot."""

import base64
import json
import random
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from cdc.capture.pgoutput.events import RelationChanged
from cdc.capture.rows import copy_text
from cdc.capture.rows.layout import images, lay_out
from cdc.errors import DecodeError
from tests.corpus.changes import PINNED, Connection, Feed
from tests.fix_servers import Database

ROWS = 300
_SIGNS = 'abcN ,{}[]"\\\t\n\r\b\f\v\x01\x7füß😀\u2028()<>;:=/%_'
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


def _text(r: random.Random) -> str:
    return "".join(r.choices(_SIGNS, k=r.choice((0, 1, 3, 40)))) if r.random() > 0.1 else "NULL"


def _moment(r: random.Random) -> datetime:
    moment = _EPOCH + timedelta(microseconds=r.randrange(-(10**16), 10**16))
    return moment.replace(microsecond=0) if r.random() < 0.3 else moment


def _list(make: Callable[[random.Random], Any]) -> Callable[[random.Random], Any]:
    return lambda r: [None if r.random() < 0.2 else make(r) for _ in range(r.randrange(5))]


def _number(r: random.Random) -> Decimal:
    return Decimal(r.randrange(-(10**40), 10**40)).scaleb(-r.randrange(30))


MAKERS: dict[str, Callable[[random.Random], Any]] = {
    "bigint": lambda r: r.randrange(-(2**63), 2**63),
    "numeric": _number,
    "double precision": lambda r: r.uniform(-1, 1) * 10.0 ** r.randrange(-300, 300),
    "text": _text,
    "bytea": lambda r: r.randbytes(r.randrange(20)),
    "boolean": lambda r: r.random() < 0.5,
    "timestamptz": _moment,
    "timestamp": lambda r: _moment(r).replace(tzinfo=None),
    "date": lambda r: _moment(r).date(),
    "uuid": lambda r: UUID(int=r.getrandbits(128)),
    "text[]": _list(_text),
    "bigint[]": _list(lambda r: r.randrange(-(2**63), 2**63)),
    "numeric[]": _list(_number),
    "boolean[]": _list(lambda r: r.random() < 0.5),
    "bytea[]": _list(lambda r: r.randbytes(r.randrange(5))),
    "timestamptz[]": _list(_moment),
}


def plain(value: Any) -> Any:
    """What a value looks like once its JSON has been read."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return Decimal(repr(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime):
        return _iso(value)
    return value.isoformat() if isinstance(value, date) else value


def _iso(value: datetime) -> str:
    text = value.replace(tzinfo=None).isoformat()
    return (text.rstrip("0") if "." in text else text) + ("Z" if value.tzinfo else "")


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    with database.connect(options=PINNED) as made:
        yield made


@pytest.fixture
def table(connection: Connection) -> tuple[Feed, list[list[Any]]]:
    """A table of random rows, some of their values NULL, and its feed."""
    columns = ", ".join(f'"{name}" {name}' for name in MAKERS)
    connection.execute(f"create table t (id int primary key, {columns}, doc jsonb)".encode())
    feed = Feed(connection, ["t"])
    r = random.Random(20_260_101)
    rows = [[None if r.random() < 0.1 else make(r) for make in MAKERS.values()] for _ in range(ROWS)]
    casts = ", ".join(f"%s::{name}" for name in MAKERS)
    query = f"insert into t values (%s, {casts}, %s::jsonb)".encode()
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(query, [(number, *row, json.dumps(row[3])) for number, row in enumerate(rows)])
    return feed, rows


def test_random_values_come_back(connection: Connection, table: tuple[Feed, list[list[Any]]]) -> None:
    feed, rows = table
    decoded = feed.decoder().feed(feed.frames())
    found = [
        json.loads(text or "", parse_int=Decimal, parse_float=Decimal) for text in decoded.rows["after"].to_pylist()
    ]
    for row, image in zip(rows, found, strict=True):
        assert [image[name] for name in MAKERS] == [plain(value) for value in row]
        assert image["doc"] == row[3]
    schema = next(event.schema for event in decoded.events if isinstance(event, RelationChanged))
    with connection.cursor().copy("copy (select * from t order by id) to stdout") as copy:
        block = copy_text.parse(b"".join(bytes(part) for part in copy), len(schema.columns))
    key, after = images(lay_out(schema), block)
    assert decoded.rows["key"].to_pylist() == key.to_pylist()
    assert decoded.rows["after"].to_pylist() == after.to_pylist()


def test_real_messages_that_are_cut_or_damaged_never_crash(table: tuple[Feed, list[list[Any]]]) -> None:
    feed, _ = table
    frames = feed.frames()[:4]
    for number, frame in enumerate(frames):
        for size in range(0, len(frame), 3):
            with pytest.raises(DecodeError):
                feed.decoder().feed([*frames[:number], frame[:size]])
    r = random.Random(7)
    for _ in range(300):
        victim = bytearray(frames[3])
        victim[r.randrange(25, len(victim))] = r.randrange(256)
        try:
            feed.decoder().feed([*frames[:3], bytes(victim)])
        except DecodeError as error:
            assert 0 <= error.offset <= len(victim)

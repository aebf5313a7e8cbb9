"""Every type of the corpus on a real Postgres: stream and snapshot give the same bytes, and the right ones."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cdc.capture.pgoutput.events import RelationChanged
from cdc.capture.rows import copy_text
from cdc.capture.rows.layout import images, lay_out
from cdc.model import TableSchema
from tests.corpus import types
from tests.corpus.changes import PINNED, Connection, Feed
from tests.corpus.types import Case
from tests.fix_servers import Database

CASES = list(types.cases())
ROWS = max(len(case.values) for case in CASES)


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    with database.connect(options=PINNED) as made:
        for statement in types.SETUP:
            made.execute(statement.encode())
        yield made


def _create(connection: Connection, cases: list[Case]) -> None:
    columns = ", ".join(f"{case.column} {case.type}" for case in cases)
    connection.execute(f"create table corpus (id int primary key, {columns})".encode())


def _insert(connection: Connection, cases: list[Case]) -> None:
    for row in range(ROWS + 1):
        present = [case for case in cases if row < len(case.values)]
        names = "".join(f", {case.column}" for case in present)
        values = "".join(f", ({case.values[row][0]})::{case.type}" for case in present)
        connection.execute(f"insert into corpus (id{names}) values ({row}{values})".encode())


def _snapshot(connection: Connection, schema: TableSchema) -> tuple[list[str | None], list[str | None]]:
    with connection.cursor().copy("copy (select * from corpus order by id) to stdout") as copy:
        lines = b"".join(bytes(block) for block in copy)
    key, after = images(lay_out(schema), copy_text.parse(lines, len(schema.columns)))
    return key.to_pylist(), after.to_pylist()


def _members(text: str) -> dict[str, str]:
    """The raw text of each member of an image: nothing may be lost to a float on the way."""
    decoder = json.JSONDecoder(parse_int=str, parse_float=str)
    members: dict[str, str] = {}
    at = 1
    while text[at - 1] != "}":
        name, at = decoder.raw_decode(text, at)
        _, end = decoder.raw_decode(text, at + 1)
        members[name] = text[at + 1 : end]
        at = end + 1
    return members


def test_every_type_comes_through_the_stream_and_the_snapshot_alike(connection: Connection) -> None:
    feed = _filled(connection)
    decoded = feed.decoder().feed(feed.frames())
    schema = next(event.schema for event in decoded.events if isinstance(event, RelationChanged))
    key, after = _snapshot(connection, schema)
    assert decoded.rows["after"].to_pylist() == after
    assert decoded.rows["key"].to_pylist() == key
    wrong = list(_differences([_members(text or "") for text in after]))
    assert not wrong


def _filled(connection: Connection) -> Feed:
    _create(connection, CASES)
    feed = Feed(connection, ["corpus"])
    _insert(connection, CASES)
    return feed


def _differences(rows: list[dict[str, str]]) -> Iterator[tuple[Any, ...]]:
    for case in CASES:
        for row, members in enumerate(rows):
            expected = case.values[row][1] if row < len(case.values) else "null"
            if members[case.column] != expected:
                yield case.type, case.values[row][0] if row < len(case.values) else None, expected, members[case.column]


def test_the_documentation_of_types_is_current() -> None:
    assert types.DOCUMENT.read_text(encoding="utf-8") == types.document()

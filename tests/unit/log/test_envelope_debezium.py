"""Messages of a Debezium connector as rows: what is cut out, what is told apart, what is refused."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.log.debezium.decode import DebeziumDecoder, schema_id_of
from cdc.log.debezium.schemas import guessed
from cdc.log.debezium.seek import offset_before
from cdc.log.debezium.types import declared_types
from cdc.log.kafka.envelope.decode import NotAnEnvelope
from cdc.log.kafka.read.ranges import OffsetRange, RangeRows
from cdc.model import TableId
from tests.corpus import golden

DECODE = DebeziumDecoder()


def message(after: str, op: str = "u", before: str = "null", lsn: object = 300, **source: object) -> bytes:
    facts = {
        "schema": "public",
        "table": "t",
        "txId": 7,
        "lsn": lsn,
        "ts_ms": 1,
        "ts_us": 1000,
        "sequence": '["200","300"]',
    }
    return f'{{"before":{before},"after":{after},"source":{json.dumps({**facts, **source})},"op":"{op}"}}'.encode()


def rows(*values: bytes, key: bytes = b'{"id":1}') -> list[dict[str, Any]]:
    return DECODE([(offset, key, value) for offset, value in enumerate(values)]).rows.to_pylist()


def test_images_keep_every_digit_and_blank() -> None:
    image = '{"id":1, "n":1.500000000000000000001}'
    (row,) = rows(message(image))
    assert row["after"] == image
    assert (row["version"], row["commit_lsn"], row["ordinal"], row["xid"]) == (300, 200, 0, 7)


def test_a_change_that_a_commit_overtook_is_newer_than_that_commit() -> None:
    """The connector gives a change's own LSN and the end of the commit before its transaction."""
    deleted = message("null", op="d", before='{"id":1}', lsn=300, sequence='["200","300"]')
    inserted = message('{"id":1}', op="c", lsn=250, sequence='["320","250"]')
    assert [row["version"] for row in rows(deleted, inserted)] == [300, 320]


def test_a_number_may_have_as_many_digits_as_postgres_gives_it() -> None:
    image = f'{{"id":1,"n":{"9" * 131_072},"u":"__debezium_unavailable_value"}}'
    (row,) = rows(message(image))
    assert row["after"] == f'{{"id":1,"n":{"9" * 131_072}}}'
    assert [column.type.name for column in guessed(TableId("public", "t"), 1, [row]).columns] == [
        "text",
        "int8",
        "int8",
    ]


def declared(*fields: dict[str, Any]) -> bytes:
    """A message whose converter tells the schema."""
    schema = {"type": "struct", "fields": [{"field": "before"}, {"field": "after", "fields": list(fields)}]}
    payload = message('{"id":1,"at":"2024-02-29T12:00:00Z","odd":1}').decode()
    return f'{{"schema":{json.dumps(schema)},"payload":{payload}}}'.encode()


def test_what_a_message_declares_goes_before_what_it_looks_like() -> None:
    decode = DebeziumDecoder()
    value = declared(
        {"field": "id", "type": "int16"},
        {"field": "at", "type": "string", "name": "io.debezium.time.ZonedTimestamp"},
        {"field": "odd", "type": "int32", "name": "io.debezium.time.Date"},
    )
    (row,) = decode([(0, b'{"id":1}', value)]).rows.to_pylist()
    schema = guessed(TableId("public", "t"), 1, [row], decode.declared[row["schema_id"]])
    assert [column.type.name for column in schema.columns] == ["int2", "timestamptz", "int8"]


def test_a_schema_that_is_none_declares_nothing() -> None:
    assert [declared_types(odd) for odd in ({}, {"fields": None}, {"fields": [{"field": "after"}]})] == [{}, {}, {}]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), max_size=30), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_seeking_an_lsn_never_passes_a_transaction_that_ends_beyond_it(runs: list[tuple[int, int]], point: int) -> None:
    """Each run is a transaction: so many changes, each followed by so many tombstones. It ends 2 after it begins."""
    kept: list[tuple[int, int]] = []
    offset = 0
    for number, (count, gap) in enumerate(runs):
        for _ in range(count):
            kept.append((offset, 2 * number))
            offset += 1 + gap

    def read(ranges: Iterable[OffsetRange]) -> list[RangeRows]:
        (wanted,) = ranges
        found = [each for each in kept if (wanted.start or 0) <= each[0] < wanted.end]
        table = pa.table({"commit_lsn": pa.array([commit for _, commit in found], pa.int64())})
        where = np.array([at for at, _ in found], np.int64)
        return [RangeRows(wanted, table, where, where)] if found else []

    begin = offset_before(read, OffsetRange("t", 0, 0, offset), point)
    assert all(at >= begin for at, before in kept if before + 2 > point)
    passed = [at for at, before in kept if before + 2 <= point - 2]
    assert all(at < begin for at in passed if any(before <= point < before + 2 for _, before in kept))


def test_a_snapshot_row_is_older_than_any_change() -> None:
    (row,) = rows(message('{"id":1}', op="r", lsn=None, sequence=None, txId=None))
    assert (row["version"], row["commit_lsn"]) == (0, 0)


@pytest.mark.parametrize(
    "value",
    [
        '"__debezium_unavailable_value"',
        '["__debezium_unavailable_value"]',
        '"X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="',
        '"5f5f646562657a69756d5f756e617661696c61626c655f76616c7565"',
        '{"__debezium_unavailable_value":"__debezium_unavailable_value"}',
    ],
)
def test_every_form_of_the_placeholder_is_an_unchanged_column(value: str) -> None:
    (row,) = rows(message(f'{{"id":1,"big":{value},"n":2}}'))
    assert row["after"] == '{"id":1,"n":2}'
    assert row["unchanged"] == ["big"]
    assert row["schema_id"] == schema_id_of('{"n":0,"big":0,"id":0}')


def test_a_text_that_only_holds_the_placeholder_is_a_text() -> None:
    image = '{"id":1,"t":"see __debezium_unavailable_value"}'
    (row,) = rows(message(image))
    assert (row["after"], row["unchanged"]) == (image, None)


def test_zeros_in_a_deletes_old_row_are_not_data() -> None:
    (row,) = rows(message("null", op="d", before='{"id":1,"n":0}'))
    assert (row["op"], row["key"], row["before"], row["after"]) == ("d", '{"id":1}', None, None)


def test_an_update_without_a_key_is_a_delete_and_an_insert() -> None:
    found = rows(message('{"n":2}', before='{"n":1}'), key=b"null")
    assert [(row["op"], row["key"], row["after"]) for row in found] == [
        ("d", '{"n":1}', None),
        ("c", '{"n":2}', '{"n":2}'),
    ]


def test_a_message_with_its_schema_is_read_too() -> None:
    value = b'{"schema":{"type":"struct"},"payload":' + message('{"id":1}') + b"}"
    (row,) = rows(value, key=b'{"schema":{},"payload":{"id":1}}')
    assert (row["key"], row["after"]) == ('{"id":1}', '{"id":1}')


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_foreign_bytes_are_named_by_their_place(value: bytes) -> None:
    with pytest.raises(NotAnEnvelope) as caught:
        rows(message('{"id":1}'), value)
    assert caught.value.row == 1


def test_a_thousand_brackets_are_foreign_bytes() -> None:
    with pytest.raises(NotAnEnvelope):
        rows(b'{"a":' + b"[" * 100_000)


def test_every_golden_message_is_read() -> None:
    found = []
    for each in golden.messages():
        if each["value"] is not None:
            facts = {"txId": 1, "lsn": 5, "ts_ms": 1, "sequence": None, **each["value"]["source"]}
            value = json.dumps({**each["value"], "source": facts}, default=float)
            found += rows(value.encode(), key=json.dumps(each["key"], default=float).encode())
    assert len(found) == sum(each["value"] is not None for each in golden.messages()) + 1  # one update without a key
    assert {row["op"] for row in found} == set("crudt")


def test_a_guessed_schema_takes_the_kind_that_any_row_shows() -> None:
    found = rows(
        message('{"id":1,"n":null,"t":"x","d":1.5,"b":true,"j":[1]}'),
        message('{"id":2,"n":3,"t":null,"d":2,"b":null,"j":null}'),
    )
    schema = guessed(TableId("public", "t"), found[0]["schema_id"], found)
    assert [(column.name, column.type.name, column.key) for column in schema.columns] == [
        ("id", "int8", True), ("n", "int8", False), ("t", "text", False),
        ("d", "float8", False), ("b", "bool", False), ("j", "jsonb", False),
    ]  # fmt: skip

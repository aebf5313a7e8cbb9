"""Debezium's envelope: what it says to others, and that it gives back our rows to the byte."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.log.kafka.envelope.decode import NotAnEnvelope, decode
from cdc.log.kafka.envelope.encode import FEW_ROWS, Messages, Origin, encode, encode_few, topic_of
from cdc.log.key_hash import murmur2, partitions_of
from cdc.model import LOG_SCHEMA

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
ORIGIN = Origin("shop", "store")
INT64 = st.integers(-(2**63), 2**63 - 1)
LSN = st.integers(0, 2**63 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=12)
IMAGES = st.dictionaries(NAMES, st.none() | st.text(max_size=20) | INT64 | st.booleans(), max_size=4).map(
    lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
)
LARGEST_TIME = 253_402_300_799_999_999


def row(**values: object) -> dict[str, object]:
    usual: dict[str, object] = {
        "table": "public.orders", "op": "u", "key": '{"id":1}', "after": '{"id":1,"n":12345.670}', "before": None,
        "unchanged": None, "version": 100, "commit_lsn": 110, "ordinal": 0, "xid": 7, "commit_ts": NOW, "schema_id": 1,
    }  # fmt: skip
    return {**usual, **values}


def log(*rows: dict[str, object]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=LOG_SCHEMA)


def only(rows: pa.Table) -> Messages:
    (messages,) = encode(rows, ORIGIN, NOW)
    return messages


def value_of(rows: pa.Table) -> dict[str, object]:
    return dict(json.loads(only(rows).values[0].as_py()))


@st.composite
def rows_of_one_table(draw: st.DrawFn) -> pa.Table:
    names = ["public.orders", '"a.b"."c""d"', "s.日本 🎉", "view.totals", 'x."q"",""snapshot"":."']
    table = draw(st.sampled_from(names))
    one = st.fixed_dictionaries(
        {
            "table": st.just(table), "op": st.sampled_from("cudrtmp"), "key": st.none() | IMAGES,
            "after": st.none() | IMAGES, "before": st.none() | IMAGES,
            "unchanged": st.none() | st.lists(NAMES, max_size=3), "version": LSN, "commit_lsn": LSN, "ordinal": LSN,
            "xid": st.integers(0, 2**32 - 1),
            "commit_ts": st.integers(-(10**15), LARGEST_TIME), "schema_id": st.integers(0, 2**31 - 1),
        }
    )  # fmt: skip
    rows = draw(st.lists(one, min_size=1, max_size=6))
    columns = {name: [item[name] for item in rows] for name in LOG_SCHEMA.names}
    arrays = [pa.array(columns[field.name], field.type) for field in LOG_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=LOG_SCHEMA)


@given(rows_of_one_table())
@settings(max_examples=60, deadline=None)
def test_every_row_comes_back_to_the_byte(rows: pa.Table) -> None:
    messages = only(rows)
    assert decode(messages.keys, messages.values).rows.to_pylist() == rows.to_pylist()
    for value in messages.values.to_pylist():
        json.loads(value)


@given(rows_of_one_table())
@settings(max_examples=60, deadline=None)
def test_few_rows_give_the_same_bytes_as_many(rows: pa.Table) -> None:
    many = list(encode(pa.concat_tables([rows] * (FEW_ROWS + 1)), ORIGIN, NOW))
    (few,) = encode_few(rows, ORIGIN, NOW, 0)
    (columns,) = many
    assert columns.values.to_pylist()[: rows.num_rows] == few.values.to_pylist()
    assert columns.keys.to_pylist()[: rows.num_rows] == few.keys.to_pylist()
    assert columns.deletes.to_pylist()[: rows.num_rows] == few.deletes.to_pylist()
    decoded = decode(columns.keys, columns.values)
    assert decoded.rows.to_pylist() == rows.to_pylist() * (FEW_ROWS + 1)


@given(rows_of_one_table(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_value_is_noticed(rows: pa.Table, data: st.DataObject) -> None:
    messages = only(rows)
    whole = messages.values[0].as_py()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(NotAnEnvelope):
        decode(messages.keys[:1], pa.array([cut], pa.binary()))


@given(st.binary(max_size=2000))
@settings(max_examples=60, deadline=None)
def test_foreign_bytes_raise_nothing_but_our_error(value: bytes) -> None:
    good = only(log(row()))
    values = pa.array([good.values[0].as_py(), value], pa.binary())
    keys = pa.array([b"{}", b"{}"], pa.binary())
    with pytest.raises(NotAnEnvelope) as caught:
        decode(keys, values)
    assert caught.value.row == 1


def test_a_length_that_lies_is_noticed() -> None:
    value = only(log(row())).values[0].as_py().replace(b'"after":         22', b'"after":         21')
    assert b'"after":         21' in value
    with pytest.raises(NotAnEnvelope):
        decode(pa.array([b"{}"], pa.binary()), pa.array([value], pa.binary()))


def test_a_consumer_of_debezium_finds_what_it_looks_for() -> None:
    value = value_of(log(row(op="c", version=29224040, commit_lsn=29224392, xid=850)))
    assert value["before"] is None
    assert value["after"] == {"id": 1, "n": 12345.67}
    assert value["op"] == "c"
    assert value["transaction"] is None
    assert value["ts_ms"] == int(NOW.timestamp() * 1000)
    source = value["source"]
    assert isinstance(source, dict)
    assert source["connector"] == "postgresql"
    assert (source["name"], source["db"], source["schema"], source["table"]) == ("shop", "store", "public", "orders")
    assert (source["lsn"], source["txId"], source["snapshot"]) == (29224040, 850, "false")
    assert json.loads(source["sequence"]) == ["29224392", "29224040"]
    assert source["ts_us"] == int(NOW.timestamp() * 1_000_000)
    assert (source["ts_ms"], source["ts_ns"]) == (source["ts_us"] // 1000, source["ts_us"] * 1000)


def test_a_snapshot_row_says_so() -> None:
    source = value_of(log(row(op="r")))["source"]
    assert isinstance(source, dict)
    assert source["snapshot"] == "true"


def test_a_delete_without_an_old_row_shows_its_key_and_asks_for_a_tombstone() -> None:
    rows = log(row(op="d", after=None))
    messages = only(rows)
    assert value_of(rows)["before"] == {"id": 1}
    assert messages.deletes.to_pylist() == [True]
    assert decode(messages.keys, messages.values).rows.to_pylist() == rows.to_pylist()


def test_numbers_keep_every_digit() -> None:
    image = '{"id":1,"n":1234567890123456789.01234567890000,"z":-0.10}'
    assert image.encode() in only(log(row(after=image))).values[0].as_py()


def test_each_table_has_its_messages_in_log_order() -> None:
    rows = log(*(row(table=f"public.t{number % 2}", ordinal=number) for number in range(6)))
    parts = {messages.table: decode(messages.keys, messages.values).rows for messages in encode(rows, ORIGIN, NOW)}
    assert parts["public.t0"].column("ordinal").to_pylist() == [0, 2, 4]
    assert parts["public.t1"].column("ordinal").to_pylist() == [1, 3, 5]


def test_rows_are_numbered_over_all_tables() -> None:
    rows = log(*(row(table=f"public.t{number % 2}") for number in range(4)))
    numbers = [decode(messages.keys, messages.values).numbers.tolist() for messages in encode(rows, ORIGIN, NOW, 10)]
    assert numbers == [[10, 12], [11, 13]]


def test_topics_are_named_as_debezium_names_them() -> None:
    assert topic_of("shop", "smp.Mixed Case-Table") == "shop.smp.Mixed_Case-Table"
    assert topic_of("shop", "public.日本") == "shop.public.__"


def test_keys_are_hashed_as_java_hashes_them() -> None:
    """Expected values of Kafka's own UtilsTest.testMurmur2."""
    expected = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    keys = pa.array(list(expected), pa.binary())
    assert murmur2(keys).astype("int32").tolist() == list(expected.values())
    assert set(partitions_of(keys, 3).tolist()) <= {0, 1, 2}
    assert partitions_of(keys[2:], 7).tolist() == partitions_of(keys, 7).tolist()[2:]

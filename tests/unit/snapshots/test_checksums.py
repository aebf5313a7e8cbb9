"""Checksums: equal for the same rows in any order and any pieces, different for anything else."""

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.json_text.members import build, quote
from cdc.json_text.quoted import all_quoted
from cdc.model import Column, PgType, TableId, TableSchema
from sinks.rows.images import arranged
from sinks.rows.stored_images import all_arranged
from snapshots.verify.checksums import Checksums

ROWS = pa.table(
    {
        "id": pa.array([1, 2, 3, 4], pa.int64()),
        "text": pa.array(["a", None, "", "null"]),
        "amount": pa.array([Decimal("1.10"), Decimal("-1.10"), None, Decimal(0)], pa.decimal128(30, 2)),
        "at": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * 4, pa.timestamp("us", "UTC")),
        "day": pa.array([date(2026, 1, 1), None, None, None], pa.date32()),
        "good": pa.array([True, False, None, None]),
        "tags": pa.array([["x"], [], None, ["x", None]], pa.list_(pa.string())),
        "raw": pa.array([b"\x00", b"", None, b"\xff"], pa.binary()),
    }
)


def of(*pieces: pa.Table) -> Checksums:
    found = Checksums()
    for piece in pieces:
        found.add(piece, ["id"])
    return found


def changed(column: str, place: int, value: object) -> pa.Table:
    values = ROWS[column].to_pylist()
    values[place] = value
    at = ROWS.column_names.index(column)
    return ROWS.set_column(at, column, pa.array(values, ROWS[column].type))


def test_the_same_rows_in_another_order_and_other_pieces_are_equal() -> None:
    assert not len(of(ROWS).differing(of(ROWS.slice(3), ROWS.slice(0, 0), ROWS.slice(0, 3))))
    assert of(ROWS).rows == 4


@pytest.mark.parametrize(
    ("column", "place", "value"),
    [
        ("id", 0, 9), ("text", 0, "b"), ("text", 1, ""), ("text", 2, None), ("text", 3, None),
        ("amount", 0, Decimal(1)), ("amount", 2, Decimal(0)), ("at", 3, datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
        ("day", 1, date(1970, 1, 1)), ("good", 1, True), ("good", 2, False), ("tags", 1, None), ("tags", 3, ["x"]),
        ("raw", 2, b""), ("raw", 3, b"\xfe"),
    ],
)  # fmt: skip
def test_a_changed_value_of_any_type_is_seen_in_its_group_alone(column: str, place: int, value: object) -> None:
    groups = of(ROWS).differing(of(changed(column, place, value)))
    assert 1 <= len(groups) <= (2 if column == "id" else 1)


def test_missing_doubled_and_swapped_rows_are_seen() -> None:
    swapped = ROWS.set_column(1, "text", ROWS["text"].take(pa.array([1, 0, 2, 3])))
    across = pa.table({"id": [1], "a": ["x"], "b": ["y"]})
    assert len(of(ROWS).differing(of(ROWS.slice(1)))) == 1
    assert len(of(ROWS).differing(of(ROWS, ROWS.slice(0, 1)))) == 1
    assert len(of(ROWS).differing(of(swapped))) == 2
    assert len(of(across).differing(of(across.rename_columns(["id", "b", "a"])))) == 1


raw = st.recursive(
    st.one_of(st.just("null"), st.integers().map(str), st.just("1.10"), st.text(max_size=8).map(quote)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda values: "[" + ",".join(values) + "]"),
        st.dictionaries(st.sampled_from(["a", 'b"', "c"]), inner, max_size=3).map(build),
    ),
    max_leaves=8,
)
SCHEMA = TableSchema(TableId("public", "t"), tuple(Column(name, PgType(25, "text")) for name in ("a", 'b"', "c")))


@given(st.lists(st.dictionaries(st.sampled_from(["a", 'b"', "c", "d"]), raw, max_size=4).map(build), max_size=5))
def test_rows_are_arranged_all_at_once_as_one_by_one(images: list[str]) -> None:
    found = all_arranged(SCHEMA, pa.array(images, pa.string()))
    assert found.to_pylist() == [arranged(SCHEMA, image) for image in images]


@given(st.lists(st.one_of(st.none(), st.text(max_size=8)), max_size=5))
def test_texts_are_quoted_all_at_once_as_one_by_one(texts: list[str | None]) -> None:
    found = all_quoted(pa.array(texts, pa.string())).to_pylist()
    assert found == [None if text is None else quote(text) for text in texts]

"""A document's id in a request, and a row's name in Redis, are the same whichever way they were found."""

import json

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.json_text.members import quote
from cdc.model import Column, PgType, TableId, TableSchema
from sinks.opensearch.mapping import document_id, document_ids, raw_document_id
from sinks.redis.keys import Names

values = st.one_of(
    st.integers().map(str),
    st.decimals(allow_nan=False, allow_infinity=False).map(str),
    st.text(max_size=200).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.text("é☃🦀a", min_size=100, max_size=300).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(['""', '"null"', '"sha256:x"', '"1"', "true", '"}"', '":1}"', '"a\\"b"', "1e5", "-0", '"{"']),
)
names = st.text('abc":{}\\ é', min_size=1, max_size=5).map(lambda name: json.dumps(name, ensure_ascii=False))


@given(st.dictionaries(names, values, min_size=1, max_size=3))
def test_the_quick_way_to_an_id_gives_the_same_id(columns: dict[str, str]) -> None:
    key = "{" + ",".join(f"{name}:{value}" for name, value in columns.items()) + "}"
    assert raw_document_id(key) == quote(document_id(key)).encode()
    assert 0 < len(document_id(key).encode()) <= 512


@given(st.lists(st.tuples(values, values), max_size=5), st.booleans(), st.sampled_from("df"))
def test_ids_and_names_of_many_rows_are_those_of_each(
    rows: list[tuple[str, str]], composite: bool, identity: str
) -> None:
    columns = ("a", "b") if composite else ("a",)
    members = [zip(columns, row[: len(columns)], strict=True) for row in rows]
    keys = ["{" + ",".join(f'"{name}":{value}' for name, value in row) + "}" for row in members]
    typed = tuple(Column(name, PgType(25, "text"), key=True) for name in columns)
    schema = TableSchema(TableId("public", "t"), typed, identity=identity)
    names = Names.of(schema, "p:", "{schema}.{table}:{key}:x")
    assert names.rows(pa.array(keys, pa.string())) == [names.row(key) for key in keys]
    assert document_ids(pa.array(keys, pa.string())).to_pylist() == [document_id(key) for key in keys]


@given(st.lists(values, max_size=5), st.sampled_from(["id", "%", "a b"]))
def test_names_of_many_rows_in_redis_are_those_of_each(texts: list[str], column: str) -> None:
    schema = TableSchema(TableId("public", "items"), (Column(column, PgType(25, "text"), key=True),))
    names = Names.of(schema, "p:", "{schema}.{table}:{key}:x")
    keys = [f"{{{json.dumps(column)}:{text}}}" for text in texts]
    assert names.rows(pa.chunked_array([keys], pa.string())) == [names.row(key) for key in keys]


odd_names = st.one_of(
    st.text("a:%{}1é\n4F-", max_size=8), st.sampled_from(["42", "42:cart", "cart:7", "-1", "null", "%3A"])
)


@given(st.lists(odd_names, max_size=6), st.sampled_from(["user:{key}", "{{table}}.x-{key}", "{key}*"]), st.booleans())
def test_rows_found_all_at_once_are_those_found_one_by_one(keys: list[str], template: str, odd: bool) -> None:
    schema = TableSchema(TableId("public", "users"), (Column("id", PgType(25, "text"), key=True),))
    names, inner = Names.of(schema, "p:", template), [Names.of(schema, "p:", "user:cart:{key}")]
    found = [names.version(f"{names.before}{key}{names.after}").encode() for key in keys] + [b"p:~v:{\xff}"] * odd
    each = [names.row_found(name, inner) for name in found]
    assert names.rows_found(found, inner) == [row.encode() for row in each if row is not None]

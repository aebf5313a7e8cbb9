"""Several tables in one index: each has its own documents, truncates, comparison and refill."""

from pathlib import Path
from typing import Any

import pytest

from cdc.config.settings import TableShape
from cdc.errors import SinkError
from cdc.key_range import KeyRange, Level
from cdc.model import Column, Lsn, TableId, TableSchema
from sinks.context import SinkContext
from sinks.fingerprints import Difference
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.sink import OpenSearchSink, open_sink
from tests.contract.test_sinks import check
from tests.fix_servers import LocalServer, opensearch_request
from tests.scenes.histories import INT4, TEXT, batch, change

ORDERS, REFUNDS = (
    TableSchema(TableId("public", name), (Column("id", INT4, key=True), Column(column, TEXT)), id=1)
    for name, column in (("orders", "label"), ("refunds", "reason"))
)
SHARED = {schema.table: TableShape(target="sales") for schema in (ORDERS, REFUNDS)}


@pytest.fixture
def sink(opensearch_server: LocalServer, index_prefix: str) -> OpenSearchSink:
    return opened(opensearch_server, index_prefix)


def opened(server: LocalServer, prefix: str, *schemas: TableSchema, **settings: Any) -> OpenSearchSink:
    own = {"url": server.url, "prefix": prefix, "replicas": 0, "shape": SHARED, **settings}
    sink = open_sink(OpenSearchSettings(**own), SinkContext(Path("unused")))
    assert isinstance(sink, OpenSearchSink)
    for schema in schemas or (ORDERS, REFUNDS):
        sink.prepare(schema)
    return sink


def row(schema: TableSchema, key: int, version: int, text: str = "x", op: str = "u") -> dict[str, Any]:
    column = schema.columns[1].name
    after = None if op == "d" else f'{{"id":{key},"{column}":"{text}"}}'
    return change(op, f'{{"id":{key}}}', version, after, table=str(schema.table))


def state(schema: TableSchema, **rows: str) -> dict[str, str]:
    column = schema.columns[1].name
    return {f'{{"id":{key[1:]}}}': f'{{"id":{key[1:]},"{column}":"{text}"}}' for key, text in rows.items()}


def test_rows_of_two_tables_with_one_key_are_two_documents_of_one_index(
    sink: OpenSearchSink, opensearch_server: LocalServer, index_prefix: str
) -> None:
    sink.apply(batch(ORDERS, [row(ORDERS, 1, 10, "a"), row(ORDERS, 2, 11, "b"), row(ORDERS, 3, 12, op="d")]))
    sink.apply(batch(REFUNDS, [row(REFUNDS, 1, 20, "c")]))
    check(sink, state(ORDERS, _1="a", _2="b"), ORDERS)
    check(sink, state(REFUNDS, _1="c"), REFUNDS)
    alias = f"/{index_prefix}sales"
    opensearch_request(opensearch_server, "POST", f"{alias}/_refresh")
    hits = opensearch_request(opensearch_server, "GET", f"{alias}/_search")["hits"]["hits"]
    assert sorted(hit["_id"] for hit in hits) == ["public.orders/1", "public.orders/2", "public.refunds/1"]
    found = {hit["_id"]: hit["_source"] for hit in hits}["public.refunds/1"]
    assert found == {"id": 1, "reason": "c", "millrace": {"version": 20, "table": "public.refunds"}}
    assert (sink.stored_key(REFUNDS, '{"id":1}').version, sink.stored_key(REFUNDS, '{"id":2}').state) == (20, "absent")


def test_a_truncate_and_a_removed_range_concern_one_table(
    sink: OpenSearchSink, opensearch_server: LocalServer, index_prefix: str
) -> None:
    for schema in (ORDERS, REFUNDS):
        sink.apply(batch(schema, [row(schema, key, 10) for key in (1, 2, 3)]))
    sink.apply(batch(ORDERS, [change("t", None, 20, table="public.orders"), row(ORDERS, 3, 21)]))
    gone = KeyRange((Level(("id",), ("number",), ("1",), ("3",)),)).text()
    sink.apply(batch(REFUNDS, [change("p", gone, 30, table="public.refunds")]))
    check(sink, state(ORDERS, _3="x"), ORDERS)
    check(sink, state(REFUNDS, _3="x"), REFUNDS)
    again = opened(opensearch_server, index_prefix, REFUNDS, ORDERS)
    again.apply(batch(REFUNDS, [row(REFUNDS, 4, 15)]))
    again.apply(batch(ORDERS, [row(ORDERS, 4, 15)]))
    check(again, state(ORDERS, _3="x"), ORDERS)
    check(again, state(REFUNDS, _3="x", _4="x"), REFUNDS)


def test_a_refill_of_one_table_leaves_the_other_and_takes_older_rows(sink: OpenSearchSink) -> None:
    for schema in (ORDERS, REFUNDS):
        sink.apply(batch(schema, [row(schema, 1, 50)]))
    sink.apply(batch(ORDERS, [change("t", None, 60, table="public.orders")]))
    marks = {schema.table: sink.mark_table(schema) for schema in (ORDERS, REFUNDS)}
    sink.recreate(ORDERS)
    sink.prepare(ORDERS)
    sink.apply(batch(ORDERS, [row(ORDERS, 1, 5, "old"), row(ORDERS, 2, 5)]))
    check(sink, state(ORDERS, _1="old", _2="x"), ORDERS)
    check(sink, state(REFUNDS, _1="x"), REFUNDS)
    compared = sink.compare_marks(marks, Lsn(0))
    assert not [found for found in compared.values() if isinstance(found, Difference)]


def test_a_lost_index_is_filled_again_table_by_table(
    sink: OpenSearchSink, opensearch_server: LocalServer, index_prefix: str
) -> None:
    for schema in (ORDERS, REFUNDS):
        sink.apply(batch(schema, [row(schema, 1, 50)]))
    opensearch_request(opensearch_server, "DELETE", f"/{index_prefix}sales-000001")
    for schema in (ORDERS, REFUNDS):
        sink.recreate(schema)
        sink.prepare(schema)
        sink.apply(batch(schema, [row(schema, 1, 40, "again")]))
    check(sink, state(ORDERS, _1="again"), ORDERS)
    check(sink, state(REFUNDS, _1="again"), REFUNDS)


def test_tables_whose_columns_do_not_fit_in_one_index_are_refused_alone(sink: OpenSearchSink) -> None:
    wrong = TableSchema(REFUNDS.table, (REFUNDS.columns[0], Column("label", INT4)), id=2)
    with pytest.raises(SinkError, match=r"label is text, not integer.*Cast or rename"):
        sink.prepare(wrong)


def test_an_index_of_one_table_is_not_shared_afterwards(opensearch_server: LocalServer, index_prefix: str) -> None:
    alone = {ORDERS.table: SHARED[ORDERS.table]}
    opened(opensearch_server, index_prefix, ORDERS, shape=alone)
    with pytest.raises(SinkError, match="was filled by one table"):
        opened(opensearch_server, index_prefix, REFUNDS)


def test_the_template_of_a_shared_index_has_the_fields_of_all_tables(
    sink: OpenSearchSink, opensearch_server: LocalServer, index_prefix: str
) -> None:
    found = opensearch_request(opensearch_server, "GET", f"/_index_template/{index_prefix}sales")
    mappings = found["index_templates"][0]["index_template"]["template"]["mappings"]
    assert {"id", "label", "reason", "millrace"} == set(mappings["properties"])

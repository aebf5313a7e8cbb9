"""The OpenSearch sink on a real server: what a searcher sees, how indexes change, what is refused."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cdc.errors import Rejected, SinkError
from cdc.model import Column, PgType, TableId, TableSchema
from sinks.context import SinkContext
from sinks.opensearch.client import TimedOut
from sinks.opensearch.mapping import index_name
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.sink import OpenSearchSink, open_sink
from tests.contract.test_sinks import check
from tests.fix_processes import wait_until
from tests.fix_servers import LocalServer, opensearch_request
from tests.scenes.histories import INT4, NUMERIC, TEXT, batch, change, table

ITEMS = table()
Open = Callable[..., OpenSearchSink]
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def opened(opensearch_server: LocalServer, index_prefix: str) -> Open:
    def make(schema: TableSchema | None = ITEMS, **settings: Any) -> OpenSearchSink:
        own = {"url": opensearch_server.url, "prefix": index_prefix, "replicas": 0, **settings}
        sink = open_sink(OpenSearchSettings(**own), SinkContext(Path("unused")))
        assert isinstance(sink, OpenSearchSink)
        if schema is not None:
            sink.prepare(schema)
        return sink

    return make


@pytest.fixture
def ask(opensearch_server: LocalServer, index_prefix: str) -> Ask:
    """A request to the alias of ITEMS, refreshed."""

    def request(query: dict[str, Any], name: str = "public.items") -> dict[str, Any]:
        opensearch_request(opensearch_server, "POST", f"/{index_prefix}{name}/_refresh")
        found = opensearch_request(opensearch_server, "POST", f"/{index_prefix}{name}/_search", {"query": query})
        return dict(found["hits"])

    return request


def row(key: int, version: int, members: str = '"label":"one"', op: str = "u") -> dict[str, Any]:
    after = None if op == "d" else f'{{"id":{key},{members}}}'
    return change(op, f'{{"id":{key}}}', version, after)


def test_a_search_through_the_alias_finds_rows_and_no_tombstones(opened: Open, ask: Ask) -> None:
    sink = opened()
    sink.apply(batch(ITEMS, [row(1, 10), row(2, 11), row(2, 12, op="d"), row(3, 13, op="d")]))
    found = ask({"match_all": {}})
    assert found["total"]["value"] == 1
    assert found["hits"][0]["_source"] == {"id": 1, "label": "one", "millrace": {"version": 10}}
    assert found["hits"][0]["_id"] == "1"


def test_numbers_are_searchable_and_keep_every_digit(opened: Open, ask: Ask) -> None:
    sink = opened()
    digits = "1234567890123456789012345678901234567890.10"
    odd = '"amount":"NaN","at":"infinity","ratio":"Infinity"'
    huge = f'"amount":{"9" * 500}'
    sink.apply(batch(ITEMS, [row(1, 10, f'"amount":{digits}'), row(2, 11, odd), row(3, 12, huge)]))
    assert [hit["_id"] for hit in ask({"term": {"amount": digits}})["hits"]] == ["1"]
    assert [hit["_id"] for hit in ask({"range": {"amount.number": {"gt": 1e39}}})["hits"]] == ["1"]
    assert [hit["_id"] for hit in ask({"term": {"amount": "NaN"}})["hits"]] == ["2"]
    check(sink, {f'{{"id":{key}}}': f'{{"id":{key},{values}}}' for key, values in
                 enumerate([f'"amount":{digits}', odd, huge], 1)})  # fmt: skip


def test_json_of_any_shape_is_kept(opened: Open) -> None:
    shapes = ["7", '"text"', "[1,[2,{}]]", '{"a":{"b":null}}', "true", "[]"]
    rows = [row(key, 10, f'"doc":{shape}') for key, shape in enumerate(shapes)]
    sink = opened()
    sink.apply(batch(ITEMS, rows))
    check(sink, {row["key"]: row["after"] for row in rows})


def test_a_column_can_be_mapped_by_hand(opened: Open, ask: Ask) -> None:
    fields = {"public.items": {"label": {"type": "text", "analyzer": "english"}}}
    opened(fields=fields).apply(batch(ITEMS, [row(1, 10, '"label":"the running mills"')]))
    assert ask({"match": {"label": "run mill"}})["total"]["value"] == 1


def test_json_can_be_mapped_as_nested_objects(opened: Open, ask: Ask) -> None:
    parts = {"type": "nested", "properties": {"size": {"type": "keyword"}, "color": {"type": "keyword"}}}
    sink = opened(fields={"public.items": {"doc": parts}})
    docs = ['[{"size":"m","color":"red"},{"size":"l","color":"blue"}]', '[{"size":"l","color":"red"}]']
    sink.apply(batch(ITEMS, [row(key, 10, f'"doc":{doc}') for key, doc in enumerate(docs, 1)]))
    both = [{"term": {"doc.size": "l"}}, {"term": {"doc.color": "red"}}]
    found = ask({"nested": {"path": "doc", "query": {"bool": {"filter": both}}}})
    assert [hit["_id"] for hit in found["hits"]] == ["2"]
    with pytest.raises(Rejected):
        sink.apply(batch(ITEMS, [row(3, 11, '"doc":"a scalar"')]))


def test_an_index_made_by_somebody_else_gets_the_mapping_of_its_table(
    opened: Open, opensearch_server: LocalServer, index_prefix: str
) -> None:
    opened(refresh_interval="7s", index={"analysis": {"analyzer": {"own": {"tokenizer": "whitespace"}}}})
    longer = TableSchema(TableId("public", "items-old"), ITEMS.columns[:2], id=1)
    opened(longer)
    name = f"/{index_prefix}public.items-restored"
    opensearch_request(opensearch_server, "PUT", name)
    made = opensearch_request(opensearch_server, "GET", name)[name[1:]]
    own = opensearch_request(opensearch_server, "GET", f"/{index_prefix}public.items")[
        f"{index_prefix}public.items-000001"
    ]
    assert made["mappings"]["properties"] == own["mappings"]["properties"]
    assert made["settings"]["index"]["refresh_interval"] == "7s"
    assert "own" in made["settings"]["index"]["analysis"]["analyzer"]
    opensearch_request(opensearch_server, "PUT", f"/{index_prefix}public.items-old-restored")
    other = opensearch_request(opensearch_server, "GET", f"/{index_prefix}public.items-old-restored/_mapping")
    properties = other[f"{index_prefix}public.items-old-restored"]["mappings"]["properties"]
    assert set(properties) == {"id", "label", "millrace"}


def test_the_template_follows_the_table(opened: Open, opensearch_server: LocalServer, index_prefix: str) -> None:
    sink = opened()
    sink.prepare(TableSchema(ITEMS.table, (*ITEMS.columns, Column("extra", INT4)), id=2))
    opened(ITEMS)  # a replay meets the old schema: the template stays
    found = opensearch_request(opensearch_server, "GET", f"/_index_template/{index_prefix}public.items")
    template = found["index_templates"][0]["index_template"]["template"]
    assert template["mappings"]["properties"]["extra"] == {"type": "integer"}


def test_refresh_interval_and_replicas_of_an_index_follow_the_settings(
    opened: Open, opensearch_server: LocalServer, index_prefix: str
) -> None:
    opened()
    opened(refresh_interval="30s", replicas=1)
    found = opensearch_request(opensearch_server, "GET", f"/{index_prefix}public.items/_settings")
    index = found[f"{index_prefix}public.items-000001"]["settings"]["index"]
    assert (index["refresh_interval"], index["number_of_replicas"]) == ("30s", "1")


def test_rows_can_be_searched_when_apply_returns_if_asked_for(
    opened: Open, opensearch_server: LocalServer, index_prefix: str
) -> None:
    sink = opened(refresh="true", refresh_interval="-1")
    sink.apply(batch(ITEMS, [row(1, 10)]))
    found = opensearch_request(opensearch_server, "POST", f"/{index_prefix}public.items/_search", {})
    assert found["hits"]["total"]["value"] == 1


def test_one_request_may_have_stale_refused_and_good_rows(opened: Open) -> None:
    sink = opened(fields={"public.items": {"label": {"type": "integer"}}})
    sink.apply(batch(ITEMS, [row(1, 20, '"label":"1"')]))
    with pytest.raises(Rejected) as caught:
        sink.apply(
            batch(ITEMS, [row(1, 10, '"label":"2"'), row(2, 21, '"label":"planted-value"'), row(3, 22, '"label":"3"')])
        )
    assert [(item.key, item.reason) for item in caught.value.items] == [
        ('{"id":2}', "mapper_parsing_exception, number_format_exception (field label of type integer)")
    ]
    check(sink, {'{"id":1}': '{"id":1,"label":"1"}', '{"id":3}': '{"id":3,"label":"3"}'})


def test_a_changed_type_gets_a_new_index_with_all_rows_and_versions(opened: Open, ask: Ask) -> None:
    sink = opened()
    sink.apply(batch(ITEMS, [row(1, 10, '"label":"12"'), row(2, 11, op="d")]))
    columns = tuple(Column("label", INT4) if column.name == "label" else column for column in ITEMS.columns)
    changed = TableSchema(ITEMS.table, columns, id=2)
    sink.prepare(changed)
    sink.apply(batch(changed, [row(2, 5, '"label":7'), row(1, 9, '"label":7'), row(3, 12, '"label":13')]))
    assert [hit["_id"] for hit in ask({"range": {"label": {"gte": 12}}})["hits"]] == ["1", "3"]
    again = opened(None)
    again.prepare(ITEMS)  # a replay meets the old schema: the index stays
    assert [hit["_index"][-6:] for hit in ask({"match_all": {}})["hits"]] == ["000002", "000002"]


def test_deleted_rows_stay_deleted_though_the_server_forgets_deletes(
    opened: Open, opensearch_server: LocalServer, index_prefix: str
) -> None:
    sink = opened()
    index = f"/{index_prefix}public.items"
    opensearch_request(opensearch_server, "PUT", f"{index}/_settings", {"index.gc_deletes": "0ms"})
    sink.apply(batch(ITEMS, [row(1, 10)]))
    sink.apply(batch(ITEMS, [row(1, 20, op="d")]))
    opensearch_request(opensearch_server, "POST", f"{index}/_flush?force=true")
    sink.apply(batch(ITEMS, [row(1, 10)]))
    check(sink, {})


def test_old_tombstones_are_purged_and_young_ones_are_not(opened: Open) -> None:
    sink, before = opened(), datetime.now(UTC)
    sink.apply(batch(ITEMS, [row(1, 10, op="d"), row(2, 11)]))
    sink.stored(ITEMS)  # makes what was written searchable
    sink.purge(ITEMS, before)
    sink.purge(ITEMS, before + timedelta(hours=1))
    wait_until(lambda: sink.stored_key(ITEMS, '{"id":1}').state == "absent", 30, "the purge")
    check(sink, {'{"id":2}': '{"id":2,"label":"one"}'})
    sink.apply(batch(ITEMS, [row(1, 20, op="d")]))
    sink.stored(ITEMS)
    sink.purge(ITEMS, before)
    assert sink.stored_key(ITEMS, '{"id":1}').state == "deleted"


def test_a_daily_purge_runs_in_the_background_and_its_failure_fails_no_batch(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tombstone_days=1e-9)
    sink.apply(batch(ITEMS, [row(key, 10, op="d") for key in range(3000)]))
    sink.stored(ITEMS)
    asked, answered = sink._client.json, list[dict[str, Any]]()

    def watched(method: str, path: str, body: object = None, **params: str) -> dict[str, Any]:
        if not path.endswith("_delete_by_query"):
            return asked(method, path, body, **params)
        answered.append(asked(method, path, body, **params))
        if len(answered) > 1:
            raise TimedOut("no answer")
        return answered[-1]

    monkeypatch.setattr(sink._client, "json", watched)
    sink.apply(batch(ITEMS, [row(5000, 11)]))
    assert not answered, "a batch may be one of many tasks'"
    sink.after_batch()
    assert list(answered[0]) == ["task"], "the server purges in the background"
    wait_until(lambda: sink.stored_key(ITEMS, '{"id":0}').state == "absent", 60, "the purge")
    sink.after_batch()
    assert len(answered) == 1, "once a day"
    sink._purged.clear()
    sink.apply(batch(ITEMS, [row(5001, 12)]))
    sink.after_batch()
    assert len(answered) == 2 and sink.stored_key(ITEMS, '{"id":5001}').state == "there"


def test_names_that_opensearch_refuses_become_distinct_names() -> None:
    names = ["Items", "items", "it ems", "it*ems", "a/b", "x" * 300, "_lead", "ünïcode", ".."]
    made = [index_name("", TableId("public", name)) for name in names] + [index_name("", TableId("_s", "items"))]
    assert len(set(made)) == len(made)
    assert made[1] == "public.items"
    assert all(len(name) < 220 and name == name.lower() and name[0] not in "-_+." for name in made)


def test_hostile_table_and_keys_cannot_smuggle_actions(opened: Open) -> None:
    hostile = TableSchema(
        TableId("public", 'x"\n{"delete":{"_id":"1"}}\n'), (Column("id", TEXT, key=True), Column("n", NUMERIC)), id=1
    )
    sink = opened(hostile)
    keys = ['{"id":"a\\"}}\\n{\\"delete\\":{}}"}', '{"id":"../_all"}', '{"id":""}', f'{{"id":"{"é" * 400}"}}']
    rows = [change("u", key, 10, key[:-1] + ',"n":1}', table=str(hostile.table)) for key in keys]
    sink.apply(batch(hostile, rows))
    check(sink, {row["key"]: row["after"] for row in rows}, hostile)


@pytest.mark.parametrize("name", ["millrace", "_id", "_source"])
def test_a_reserved_column_name_is_refused_with_a_remedy(opened: Open, name: str) -> None:
    schema = TableSchema(ITEMS.table, (Column("id", INT4, key=True), Column(name, PgType(25, "text"))), id=1)
    with pytest.raises(SinkError, match=f"column '{name}' of public.items"):
        opened(schema)

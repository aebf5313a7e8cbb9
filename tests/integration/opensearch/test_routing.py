"""Routing by a column: one live document per key, and no old copy on the shard of the value before."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdc.errors import Rejected, SinkError
from cdc.model import TableSchema
from sinks.context import SinkContext
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.sink import OpenSearchSink, open_sink
from tests.contract.test_sinks import check
from tests.fix_servers import LocalServer, opensearch_request
from tests.scenes.histories import INTEGERS, History, batch, change, cut, table

ITEMS = table()
BY_LABEL = {"public.items": "label"}
Open = Callable[..., OpenSearchSink]
Hits = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def opened(opensearch_server: LocalServer, index_prefix: str) -> Open:
    def make(schema: TableSchema = ITEMS, **settings: Any) -> OpenSearchSink:
        own = {"url": opensearch_server.url, "prefix": index_prefix, "replicas": 0, "shards": 4, **settings}
        sink = open_sink(OpenSearchSettings(**own), SinkContext(Path("unused")))
        assert isinstance(sink, OpenSearchSink)
        sink.prepare(schema)
        return sink

    return make


@pytest.fixture
def hits(opensearch_server: LocalServer, index_prefix: str) -> Hits:
    """Every live document, by id."""

    def search() -> list[dict[str, Any]]:
        opensearch_request(opensearch_server, "POST", f"/{index_prefix}public.items/_refresh")
        found = opensearch_request(
            opensearch_server, "POST", f"/{index_prefix}public.items/_search", {"size": 500, "sort": ["id"]}
        )
        return list(found["hits"]["hits"])

    return search


def row(key: int, version: int, label: str | None = "one", op: str = "u") -> dict[str, Any]:
    text = "null" if label is None else f'"{label}"'
    return change(op, f'{{"id":{key}}}', version, None if op == "d" else f'{{"id":{key},"label":{text}}}')


def test_a_routed_search_finds_the_documents_of_its_value(
    opened: Open, hits: Hits, opensearch_server: LocalServer, index_prefix: str
) -> None:
    sink = opened(routing=BY_LABEL)
    sink.apply(batch(ITEMS, [row(key, 10, f"tenant-{key % 5}") for key in range(40)] + [row(40, 10, None)]))
    assert {hit["_id"]: hit.get("_routing") for hit in hits()} == {
        **{str(key): f"tenant-{key % 5}" for key in range(40)},
        "40": None,
    }
    query = {"size": 100, "query": {"term": {"label.keyword": "tenant-3"}}}
    alias = f"/{index_prefix}public.items/_search?routing=tenant-3"
    assert opensearch_request(opensearch_server, "POST", alias, query)["hits"]["total"]["value"] == 8


def test_a_changed_value_removes_the_document_under_the_old_one(opened: Open, hits: Hits) -> None:
    sink = opened(routing=BY_LABEL)
    sink.apply(batch(ITEMS, [row(key, 10, "old") for key in range(20)]))
    sink.apply(batch(ITEMS, [row(key, 20, f"new-{key}") for key in range(20)]))
    assert [hit["_routing"] for hit in hits()] == [f"new-{key}" for key in range(20)]
    sink.apply(batch(ITEMS, [row(key, 10, "old") for key in range(20)]))
    sink.apply(batch(ITEMS, [row(key, 15, f"skipped-{key}") for key in range(20)]))
    assert [hit["_routing"] for hit in hits()] == [f"new-{key}" for key in range(20)]


def test_a_delete_finds_its_document_and_outlasts_older_writes(opened: Open, hits: Hits) -> None:
    sink = opened(routing=BY_LABEL)
    sink.apply(batch(ITEMS, [row(key, 10, f"at-{key}") for key in range(8)]))
    sink.apply(batch(ITEMS, [row(key, 20, op="d") for key in range(12)]))
    assert hits() == []
    sink.apply(batch(ITEMS, [row(key, 15, f"elsewhere-{key}") for key in range(12)]))
    assert hits() == []


def test_a_truncate_reaches_every_shard(opened: Open, hits: Hits) -> None:
    sink = opened(routing=BY_LABEL)
    sink.apply(batch(ITEMS, [row(key, 10 + key, f"at-{key}") for key in range(20)]))
    sink.apply(batch(ITEMS, [change("t", None, 26)]))  # a store is given the version below
    assert [hit["_id"] for hit in hits()] == ["15", "16", "17", "18", "19"]


def test_a_repeat_after_a_crash_hides_the_old_documents(opened: Open, hits: Hits) -> None:
    sink = opened(routing=BY_LABEL)
    sink.apply(batch(ITEMS, [row(key, 10, "old") for key in range(10)]))
    half = opened(routing=BY_LABEL)
    half._routes[ITEMS.table] = type(half._routes[ITEMS.table])("label")  # writes, and searches no other copies
    half.apply(batch(ITEMS, [row(key, 20, f"new-{key}") for key in range(10)]))
    assert len(hits()) > 10
    sink.apply(batch(ITEMS, [row(key, 20, f"new-{key}") for key in range(10)]))
    assert [hit["_routing"] for hit in hits()] == [f"new-{key}" for key in range(10)]


@pytest.mark.parametrize("seed", range(2))
def test_a_replay_beside_the_live_writer_leaves_one_document_per_key(opened: Open, hits: Hits, seed: int) -> None:
    rng = random.Random(seed)
    history = History(ITEMS, INTEGERS, rng).write(150)
    batches = [batch(ITEMS, rows) for rows in cut(history.rows, rng)]
    whole = batch(ITEMS, history.rows)
    opened(routing=BY_LABEL).apply(whole)
    replaying = [threading.Thread(target=_replay, args=(opened(routing=BY_LABEL), batches)) for _ in range(2)]
    for thread in replaying:
        thread.start()
    for thread in replaying:
        thread.join(120)
    ids = [hit["_id"] for hit in hits()]
    assert len(ids) == len(set(ids))
    check(opened(routing=BY_LABEL), history.state())


def _replay(sink: OpenSearchSink, batches: list[Any]) -> None:
    for one in batches:
        sink.apply(one)


def test_a_refused_row_keeps_its_old_document(opened: Open, hits: Hits) -> None:
    fields = {"public.items": {"amount": {"type": "integer"}}}
    sink = opened(routing=BY_LABEL, fields=fields)
    sink.apply(batch(ITEMS, [row(1, 10, "old")]))
    poison = change("u", '{"id":1}', 20, '{"id":1,"label":"new","amount":"planted"}')
    with pytest.raises(Rejected):
        sink.apply(batch(ITEMS, [poison]))
    assert [(hit["_id"], hit["_routing"], hit["_source"]["label"]) for hit in hits()] == [("1", "old", "old")]


def test_with_one_shard_no_copies_are_searched(opened: Open, hits: Hits) -> None:
    sink = opened(routing=BY_LABEL, shards=1)
    assert not sink._routes[ITEMS.table].multi_shard
    sink.apply(batch(ITEMS, [row(1, 10, "a"), row(2, 10, "a")]))
    sink.apply(batch(ITEMS, [row(1, 20, "b"), row(2, 20, op="d")]))
    assert [(hit["_id"], hit["_routing"]) for hit in hits()] == [("1", "b")]


def test_routing_that_differs_from_that_of_the_index_is_refused(opened: Open) -> None:
    opened().apply(batch(ITEMS, [row(1, 10)]))
    with pytest.raises(SinkError, match=r"filled with routing by 'id', not by 'label'.*backfill"):
        opened(routing=BY_LABEL)


def test_routing_by_an_unknown_column_is_refused(opened: Open) -> None:
    with pytest.raises(SinkError, match=r"column 'lable', which public\.items does not have"):
        opened(routing={"public.items": "lable"})

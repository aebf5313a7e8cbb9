"""OpenSearch faults: read-only, overloaded, index deleted, killed, disconnected."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdc.errors import Busy, Lost, Rejected
from sinks.context import SinkContext
from sinks.opensearch import client
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.sink import OpenSearchSink, open_sink
from tests.contract.test_sinks import check
from tests.fix_processes import wait_until
from tests.fix_proxy import MakeProxy, Proxy
from tests.fix_servers import LocalServer, MakeOpenSearch, opensearch_request
from tests.scenes.histories import batch, change, images, labelled, state_of, table

ITEMS = table()
Open = Callable[..., OpenSearchSink]


@pytest.fixture
def opened(opensearch_server: LocalServer, index_prefix: str) -> Open:
    def make(**settings: Any) -> OpenSearchSink:
        own = {"url": opensearch_server.url, "prefix": index_prefix, "replicas": 0, **settings}
        sink = open_sink(OpenSearchSettings(**own), SinkContext(Path("unused")))
        sink.prepare(ITEMS)
        assert isinstance(sink, OpenSearchSink)
        return sink

    return make


def test_writes_and_deletes_wait_for_a_read_only_index(
    opened: Open, opensearch_server: LocalServer, index_prefix: str
) -> None:
    sink = opened()
    sink.apply(batch(ITEMS, labelled(3, 10)))
    setting = f"/{index_prefix}public.items/_settings"
    opensearch_request(opensearch_server, "PUT", setting, {"index.blocks.read_only_allow_delete": True})
    changes = [*labelled(2, 20, "newer"), change("d", '{"id":2}', 20)]
    with pytest.raises(Busy, match="blocks writes"):
        sink.apply(batch(ITEMS, changes))
    check(sink, state_of(labelled(3, 10)))
    opensearch_request(opensearch_server, "PUT", setting, {"index.blocks.read_only_allow_delete": None})
    sink.apply(batch(ITEMS, changes))
    check(sink, state_of(labelled(2, 20, "newer")))


def test_rows_wait_for_a_closed_index_and_become_no_dead_letters(
    opened: Open, opensearch_server: LocalServer, index_prefix: str
) -> None:
    sink = opened()
    index = f"/{index_prefix}public.items-000001"
    opensearch_request(opensearch_server, "POST", f"{index}/_close")
    with pytest.raises(Busy, match="is closed"):
        sink.apply(batch(ITEMS, labelled(2, 20)))
    opensearch_request(opensearch_server, "POST", f"{index}/_open?wait_for_active_shards=1")
    sink.apply(batch(ITEMS, labelled(2, 20)))
    check(sink, state_of(labelled(2, 20)))


def test_a_tripped_breaker_makes_the_requests_smaller(opened: Open, opensearch_server: LocalServer) -> None:
    sink = opened(bulk_mb=2.0)
    limit = "network.breaker.inflight_requests.limit"
    opensearch_request(opensearch_server, "PUT", "/_cluster/settings", {"persistent": {limit: "700kb"}})
    try:
        sink.apply(batch(ITEMS, labelled(300, 10, "x" * 5000)))
    finally:
        opensearch_request(opensearch_server, "PUT", "/_cluster/settings", {"persistent": {limit: None}})
    check(sink, state_of(labelled(300, 10, "x" * 5000)))


def test_a_deleted_index_is_lost_and_only_prepare_creates_it_again(
    opened: Open, opensearch_server: LocalServer, index_prefix: str
) -> None:
    sink = opened()
    sink.apply(batch(ITEMS, labelled(3, 10)))
    opensearch_request(opensearch_server, "DELETE", f"/{index_prefix}public.items-000001")
    with pytest.raises(Lost, match="is gone"):
        sink.apply(batch(ITEMS, labelled(1, 20)))
    assert opensearch_request(opensearch_server, "GET", f"/{index_prefix}public.items-000001") == {}
    sink.prepare(ITEMS)
    sink.apply(batch(ITEMS, labelled(1, 20)))
    check(sink, state_of(labelled(1, 20)))
    found = opensearch_request(opensearch_server, "GET", f"/{index_prefix}public.items/_mapping")
    assert found[f"{index_prefix}public.items-000001"]["mappings"]["properties"]["good"] == {"type": "boolean"}


def test_a_node_killed_during_a_bulk_request_is_lost_and_correct_after_a_repeat(
    opened: Open, opensearch_server: LocalServer, proxy: MakeProxy
) -> None:
    between = proxy(opensearch_server.port)
    sink = opened(url=f"http://127.0.0.1:{between.port}", bulk_mb=0.5)
    sink.apply(batch(ITEMS, labelled(2000, 10)))
    sink.apply(batch(ITEMS, [change("d", '{"id":7}', 20)]))
    newer = labelled(2000, 15, "newer" * 200)
    killer = threading.Thread(
        target=_kill_after, args=(opensearch_server, between, between.forwarded["up"] + 1_000_000)
    )
    killer.start()
    with pytest.raises(Lost):
        sink.apply(batch(ITEMS, newer))
    killer.join(60)
    opensearch_server.start()
    stored = {row["after"] for row in sink.stored(ITEMS).to_pylist()}
    assert len(stored & _arranged(sink, state_of(newer))) > 0, "nothing was written before the kill"
    sink.apply(batch(ITEMS, newer))
    sink.apply(batch(ITEMS, labelled(2000, 10)))
    expected = state_of(newer)
    del expected['{"id":7}']
    check(sink, expected)


def _kill_after(server: LocalServer, between: Proxy, count: int) -> None:
    wait_until(lambda: between.forwarded["up"] > count, 60)
    server.kill()


def _arranged(sink: OpenSearchSink, state: dict[str, str]) -> set[str]:
    return {str(row["after"]) for row in sink.expected(ITEMS, images(state)).to_pylist()}


def test_only_items_that_a_full_queue_rejects_are_sent_again_in_smaller_requests(
    private_opensearch: MakeOpenSearch,
) -> None:
    """The same requests have rows that are stored, stale rows, and one that is refused permanently."""
    server = private_opensearch({"thread_pool.write.size": 1, "thread_pool.write.queue_size": 1})
    fields = {"public.items": {"amount": {"type": "integer"}}}
    settings = OpenSearchSettings(url=server.url, replicas=0, shards=8, bulk_mb=2.0, fields=fields)
    sink = open_sink(settings, SinkContext(Path("unused")))
    assert isinstance(sink, OpenSearchSink)
    sink.prepare(ITEMS)
    sink.apply(batch(ITEMS, labelled(20, 50, "newer")))
    sent = _counted(sink)
    poison = change("u", '{"id":-1}', 10, '{"id":-1,"amount":"planted"}')
    with pytest.raises(Rejected) as caught:
        sink.apply(batch(ITEMS, [*labelled(600, 10, "x" * 5000), poison]))
    assert [item.key for item in caught.value.items] == ['{"id":-1}']
    check(sink, state_of(labelled(600, 10, "x" * 5000)) | state_of(labelled(20, 50, "newer")))
    first_round = [count for index, count in enumerate(sent) if sum(sent[: index + 1]) <= 601]
    retried = sent[len(first_round) :]
    assert retried, "nothing was rejected: the queue was not full"
    assert max(retried) < max(first_round)
    statistics = opensearch_request(server, "GET", "/_nodes/stats/thread_pool")["nodes"]
    assert next(iter(statistics.values()))["thread_pool"]["write"]["rejected"] > 0


def _counted(sink: OpenSearchSink) -> list[int]:
    """The number of items in each bulk request from now on."""
    sent: list[int] = []
    send = sink._client.text

    def counted(method: str, path: str, body: Any = None, **params: str) -> str:
        if path.endswith("_bulk"):
            sent.append(body.count(b'{"index":'))
        return send(method, path, body, **params)

    sink._client.text = counted  # type: ignore[method-assign]
    return sent


def test_a_server_too_slow_to_answer_in_time_gets_smaller_requests(
    opened: Open, opensearch_server: LocalServer, proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_TIMEOUT", 10.0)
    between = proxy(opensearch_server.port)
    sink = opened(url=f"http://127.0.0.1:{between.port}")
    before = sink._bulk.limit
    between.one_way("up")
    with pytest.raises(Busy, match="did not answer in 10 s"):
        sink.apply(batch(ITEMS, labelled(50, 10)))
    assert sink._bulk.limit == before // 2
    between.reset()
    between.pass_on()
    sink.apply(batch(ITEMS, labelled(50, 10)))
    check(sink, state_of(labelled(50, 10)))

"""OpenSearch in trouble: read-only, overloaded, its index gone, killed, cut off."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdc.errors import Busy, Lost
from sinks.context import SinkContext
from sinks.opensearch import OpenSearchSink, open_sink
from sinks.opensearch_settings import OpenSearchSettings
from tests.contract.test_sinks import check
from tests.fix_proxy import MakeProxy
from tests.fix_servers import LocalServer, opensearch_request
from tests.histories import batch, change, table

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


def rows(count: int, version: int, filler: str = "x") -> list[dict[str, Any]]:
    return [change("u", f'{{"id":{key}}}', version, f'{{"id":{key},"label":"{filler}"}}') for key in range(count)]


def state(count: int, version: int, filler: str = "x") -> dict[str, str]:
    return {row["key"]: row["after"] for row in rows(count, version, filler)}


def test_a_read_only_index_is_waited_for_and_deletes_wait_too(
    opened: Open, opensearch_server: LocalServer, index_prefix: str
) -> None:
    sink = opened()
    sink.apply(batch(ITEMS, rows(3, 10)))
    setting = f"/{index_prefix}public.items/_settings"
    opensearch_request(opensearch_server, "PUT", setting, {"index.blocks.read_only_allow_delete": True})
    changes = [*rows(2, 20, "newer"), change("d", '{"id":2}', 20)]
    with pytest.raises(Busy, match="blocks writes"):
        sink.apply(batch(ITEMS, changes))
    check(sink, state(3, 10))
    opensearch_request(opensearch_server, "PUT", setting, {"index.blocks.read_only_allow_delete": None})
    sink.apply(batch(ITEMS, changes))
    check(sink, state(2, 20, "newer"))


def test_a_tripped_breaker_makes_the_requests_smaller(opened: Open, opensearch_server: LocalServer) -> None:
    sink = opened(bulk_mb=2.0)
    limit = "network.breaker.inflight_requests.limit"
    opensearch_request(opensearch_server, "PUT", "/_cluster/settings", {"persistent": {limit: "700kb"}})
    try:
        sink.apply(batch(ITEMS, rows(300, 10, "x" * 5000)))
    finally:
        opensearch_request(opensearch_server, "PUT", "/_cluster/settings", {"persistent": {limit: None}})
    check(sink, state(300, 10, "x" * 5000))


def test_an_index_that_vanished_is_made_again_with_its_mapping(
    opened: Open, opensearch_server: LocalServer, index_prefix: str
) -> None:
    sink = opened()
    sink.apply(batch(ITEMS, rows(3, 10)))
    opensearch_request(opensearch_server, "DELETE", f"/{index_prefix}public.items-000001")
    with pytest.raises(Busy, match="had vanished") as caught:
        sink.apply(batch(ITEMS, rows(1, 20)))
    assert "backfill" in caught.value.remedy
    sink.apply(batch(ITEMS, rows(1, 20)))
    check(sink, state(1, 20))
    found = opensearch_request(opensearch_server, "GET", f"/{index_prefix}public.items/_mapping")
    assert found[f"{index_prefix}public.items-000001"]["mappings"]["properties"]["good"] == {"type": "boolean"}


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_lost_reply_makes_the_repeat_a_no_op(
    opened: Open, opensearch_server: LocalServer, proxy: MakeProxy, direction: Any
) -> None:
    between = proxy(opensearch_server.port)
    sink = opened(url=f"http://127.0.0.1:{between.port}")
    between.cut_after(1 if direction == "down" else 20_000, direction)
    with pytest.raises(Lost):
        sink.apply(batch(ITEMS, rows(500, 10)))
    sink.apply(batch(ITEMS, rows(500, 10)))
    sink.apply(batch(ITEMS, rows(250, 5, "stale")))
    check(sink, state(500, 10))


def test_a_killed_node_is_lost_and_right_after_its_return(opened: Open, opensearch_server: LocalServer) -> None:
    sink = opened()
    sink.apply(batch(ITEMS, rows(20, 10)))
    sink.apply(batch(ITEMS, [change("d", '{"id":7}', 20)]))
    opensearch_server.kill()
    with pytest.raises(Lost):
        sink.apply(batch(ITEMS, rows(20, 15, "newer")))
    opensearch_server.start()
    sink.apply(batch(ITEMS, rows(20, 15, "newer")))
    expected = state(20, 15, "newer")
    del expected['{"id":7}']
    check(sink, expected)

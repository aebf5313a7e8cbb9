"""What a store holds of a view, read with an ordinary client."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

import redis
from opensearchpy import OpenSearch

from cdc.config.settings import SinkSettings
from cdc.model import TableId
from deploy.examples.example import Search

_MOST = 1000
_METADATA = "millrace"

Rows = dict[str, str]
"""Rows as JSON, by the name that the store knows them by."""


def stored_rows(sink: SinkSettings, table: TableId) -> Rows:
    """Every row of a view in a store of kind `opensearch` or `redis`."""
    return _READERS[sink.kind](_url(sink), str(table))


def found_documents(sink: SinkSettings, search: Search) -> Rows:
    """The documents that a search finds."""
    with _opensearch(_url(sink)) as client:
        return dict(_documents(client, search.index, search.query))


def clear(sink: SinkSettings, table: TableId) -> None:
    """Remove what a former run has left of a view in a store, with what is stored beside its rows."""
    if sink.kind == "redis":
        with closing(redis.Redis.from_url(_url(sink))) as client:
            client.flushdb()
        return
    with _opensearch(_url(sink)) as client:
        client.indices.delete(index=f"{table}-*", ignore_unavailable=True)


def _redis_rows(url: str, table: str) -> Rows:
    with closing(redis.Redis.from_url(url, decode_responses=True)) as client:
        names = sorted(map(str, client.scan_iter(f"{table}:*")))
        values = client.mget(names) if names else []
        return {name: str(value) for name, value in zip(names, values, strict=True)}


def _opensearch_rows(url: str, table: str) -> Rows:
    with _opensearch(url) as client:
        client.indices.refresh(index=table, ignore_unavailable=True)
        return dict(_documents(client, table, {"match_all": {}}))


def _documents(client: OpenSearch, index: str, query: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    body = {"query": query, "size": _MOST}
    answer = client.search(index=index, body=body, ignore_unavailable=True)
    for hit in sorted(answer["hits"]["hits"], key=lambda hit: str(hit["_id"])):
        row = {name: value for name, value in hit["_source"].items() if name != _METADATA}
        yield f"{index}/{hit['_id']}", json.dumps(row, ensure_ascii=False)


@contextmanager
def _opensearch(url: str) -> Iterator[OpenSearch]:
    with closing(OpenSearch(url)) as client:
        yield client


def _url(sink: SinkSettings) -> str:
    return str(getattr(sink, "url"))  # noqa: B009 - the class of the sink's settings is private to the sink


_READERS = {"opensearch": _opensearch_rows, "redis": _redis_rows}

"""Reads one order from each store with an ordinary client."""

import json
from contextlib import closing
from decimal import Decimal

import psycopg
import redis
from deltalake import DeltaTable
from opensearchpy import OpenSearch

from cdc.config.settings import Settings, SinkSettings


def one_order(settings: Settings, owner: psycopg.Connection) -> dict[str, str]:
    """The newest order that was changed after it was placed, read from each store with an ordinary client."""
    row = owner.execute(
        "select id, status, total::text, user_id from orders order by updated_at > placed_at desc, id desc limit 1"
    ).fetchone()
    assert row is not None
    number = row[0]
    found = {"Postgres": f"order {number}: {row[1]}, total {row[2]}, user {row[3]}"}
    for sink in settings.sinks:
        found[sink.name] = _READERS[sink.kind](sink, number)
    return found


def _from_delta(sink: SinkSettings, number: int) -> str:
    path = f"{getattr(sink, 'path')}/public.orders"  # noqa: B009 - the class of the sink's settings is private to the sink
    rows = DeltaTable(path).to_pyarrow_table(filters=[("id", "=", number), ("_millrace_deleted", "=", False)])
    row = rows.select(["id", "status", "total", "user_id"]).to_pylist()[0]
    return f"{_described(row)}   ({path})"


def _from_opensearch(sink: SinkSettings, number: int) -> str:
    address = str(getattr(sink, "url"))  # noqa: B009
    with closing(OpenSearch(address)) as client:
        answer = client.search(index="public.orders", body={"query": {"term": {"id": number}}})
    hits = answer["hits"]["hits"]
    return f"{_described(hits[0]['_source'])}   ({address}/public.orders/_search)" if hits else "nothing"


def _from_redis(sink: SinkSettings, number: int) -> str:
    name = f"public.orders:{number}"
    with closing(redis.Redis.from_url(getattr(sink, "url"))) as client:  # noqa: B009
        found = client.get(name)
    return f"{_described(json.loads(found, parse_float=str))}   (GET {name})" if isinstance(found, bytes) else "nothing"


def _described(row: dict[str, object]) -> str:
    total = Decimal(str(row["total"])).quantize(Decimal("0.01"))  # a JSON number has no trailing zeros
    return f"order {row['id']}: {row['status']}, total {total}, user {row['user_id']}"


_READERS = {"delta": _from_delta, "opensearch": _from_opensearch, "redis": _from_redis}

"""The Redis sink on real servers: row formats, names, lifetimes, and a cluster of one node."""

import random
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import ValidationError

from cdc.config.secret import Secret
from cdc.errors import SinkError
from cdc.model import Column, TableId, TableSchema
from sinks.context import SinkContext
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import RedisSink, open_sink
from tests.fix_processes import wait_until
from tests.fix_servers import MakeRedis
from tests.scenes.histories import INT4, INTEGERS, NUMERIC, TEXT, History, batch, change, images, table

ITEMS = table()
ROW = '{"id":1,"label":"one","amount":12345678901234567890123456789012345.10,"big":"large"}'


def opened(url: str, schema: TableSchema = ITEMS, **settings: Any) -> RedisSink:
    sink = open_sink(RedisSettings(url=url, **settings), SinkContext(Path("unused")))
    sink.prepare(schema)
    assert isinstance(sink, RedisSink)
    return sink


def row(version: int, after: str | None = ROW, op: str = "u", key: str = '{"id":1}') -> dict[str, Any]:
    return change(op, key, version, after)


def test_a_row_is_the_json_text_of_the_log(redis_url: str) -> None:
    opened(redis_url).apply(batch(ITEMS, [row(10)]))
    assert redis.Redis.from_url(redis_url).get("public.items:1") == ROW.encode()


def test_a_row_can_be_a_hash_of_texts_without_nulls(redis_url: str) -> None:
    after = '{"id":1,"label":"quo\\"te","amount":1.10,"doc":{"a":[1]},"good":true,"ratio":null}'
    opened(redis_url, form="hash").apply(batch(ITEMS, [row(10, after)]))
    found = redis.Redis.from_url(redis_url, decode_responses=True).hgetall("public.items:1")
    assert found == {"id": "1", "label": 'quo"te', "amount": "1.10", "doc": '{"a":[1]}', "good": "true"}


def test_a_table_can_have_names_of_its_own(redis_url: str) -> None:
    opened(redis_url, prefix="app:", keys={"public.items": "item:{key}:row"}).apply(batch(ITEMS, [row(10)]))
    assert redis.Redis.from_url(redis_url).exists("app:item:1:row")


def test_two_tables_with_the_same_key_names_are_refused(redis_url: str) -> None:
    sink = opened(redis_url, key="row:{key}")
    with pytest.raises(SinkError, match=r"public\.items and public\.others would have the same keys"):
        sink.prepare(table("others"))


def test_the_parts_of_a_composite_key_are_joined_without_ambiguity(redis_url: str) -> None:
    pairs = table("pairs", [("a", TEXT), ("b", TEXT)])
    rows = [
        change("u", '{"a":"x:y","b":"z"}', 10, '{"a":"x:y","b":"z"}', table="public.pairs"),
        change("u", '{"a":"x","b":"y:z"}', 10, '{"a":"x","b":"y:z"}', table="public.pairs"),
    ]
    opened(redis_url, pairs).apply(batch(pairs, rows))
    names = {name.decode() for name in redis.Redis.from_url(redis_url).scan_iter("public*")}
    assert names == {"public.pairs:x%3Ay:z", "public.pairs:x:y%3Az"}


def test_rows_and_tombstones_expire_as_configured(redis_url: str) -> None:
    sink = opened(redis_url, ttl_seconds=100, tombstone_seconds=50)
    sink.apply(batch(ITEMS, [row(10), row(10, None, "d", '{"id":2}')]))
    client = redis.Redis.from_url(redis_url)
    assert 90 < client.ttl("public.items:1") <= 100
    assert 140 < client.ttl("~v:{public.items:1}") <= 150
    assert 40 < client.ttl("~v:{public.items:2}") <= 50


def test_a_repeat_brings_back_a_row_that_was_evicted(redis_url: str) -> None:
    sink = opened(redis_url)
    sink.apply(batch(ITEMS, [row(10)]))
    client = redis.Redis.from_url(redis_url)
    client.delete("public.items:1")
    sink.apply(batch(ITEMS, [row(10)]))
    assert client.exists("public.items:1")


def test_a_batch_may_have_rows_of_many_cluster_slots(private_redis: MakeRedis) -> None:
    server = private_redis({"cluster-enabled": "yes"})
    node = redis.Redis.from_url(server.url)
    node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)  # type: ignore[no-untyped-call]
    wait_until(lambda: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"), 30)  # type: ignore[no-untyped-call]
    sink = opened(f"redis://{server.host}:{server.port}", cluster=True)
    history = History(ITEMS, INTEGERS, random.Random(3)).write(60)
    for start in range(0, len(history.rows), 20):
        sink.apply(batch(ITEMS, history.rows[start : start + 20]))
    assert sink.stored(ITEMS).to_pylist() == sink.expected(ITEMS, images(history.state())).to_pylist()


def test_a_table_with_hostile_names_changes_no_other_keys(redis_url: str) -> None:
    odd = TableSchema(TableId("we*ird", 'ta[b]l:e"{x}'), (Column("id", INT4, key=True), Column("n", NUMERIC)), id=1)
    sink = opened(redis_url, odd)
    client = redis.Redis.from_url(redis_url)
    client.set("weXird.other:1", "mine")
    rows = [change("u", '{"id":1}', 10, '{"id":1,"n":1}', table=str(odd.table))]
    sink.apply(batch(odd, rows))
    sink.apply(batch(odd, [change("t", None, 20, table=str(odd.table))]))
    assert sink.stored(odd).num_rows == 0
    assert client.get("weXird.other:1") == b"mine"


@pytest.mark.parametrize("wrong", [{"url": "redis://:secret@h"}, {"key": "no-key"}, {"keys": {"public.a": "x"}}])
def test_wrong_settings_are_refused_and_not_shown(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        RedisSettings(**wrong)
    assert "secret" not in caught.value.errors(include_input=False)[0]["msg"]


def test_the_rights_that_the_documentation_names_suffice(private_redis: MakeRedis) -> None:
    server = private_redis()
    rights = ["on", ">secret", "~app:*", "+@read", "+@write", "+@scripting", "+@connection"]
    admin = redis.Redis.from_url(server.url)
    admin.execute_command("ACL", "SETUSER", "millrace", *rights)  # type: ignore[no-untyped-call]
    sink = opened(server.url, username="millrace", password=Secret("secret"), prefix="app:")
    sink.apply(batch(ITEMS, [row(10), row(10, None, "d", '{"id":2}')]))
    sink.apply(batch(ITEMS, [change("u", '{"id":1}', 11, '{"id":1,"label":"two"}', ["big"])]))
    assert sink.stored(ITEMS).num_rows == 1
    sink.apply(batch(ITEMS, [change("t", None, 20)]))
    assert sink.stored(ITEMS).num_rows == 0
    assert sink.facts() == {"eviction policy": "unknown"}


@pytest.mark.parametrize("settings", [{}, {"lookups": {"public.items": ("label",)}}, {"form": "hash"}])
def test_a_truncate_deletes_only_rows_that_millrace_wrote(redis_url: str, settings: dict[str, Any]) -> None:
    """It keeps keys of the application that look like rows, and rows of a table with a longer name."""
    carts = table("carts")
    sink = opened(redis_url, keys={"public.items": "user:{key}", "public.carts": "user:cart:{key}"}, **settings)
    sink.prepare(carts)
    client = redis.Redis.from_url(redis_url)
    client.rpush("user:42:cart", "socks")
    client.set("user:7", "the application's")
    sink.apply(batch(ITEMS, [change("u", f'{{"id":{key}}}', 10, f'{{"id":{key},"label":"a"}}') for key in (1, 42)]))
    sink.apply(batch(carts, [change("u", '{"id":1}', 10, '{"id":1,"label":"b"}', table="public.carts")]))
    assert sink.stored(ITEMS).num_rows == 2
    sink.apply(batch(ITEMS, [change("t", None, 20)]))
    assert client.exists("user:1", "user:42") == 0
    assert client.exists("user:42:cart", "user:7", "user:cart:1") == 3
    assert sink.stored(ITEMS).num_rows == 0
    assert sink.stored(carts).num_rows == 1

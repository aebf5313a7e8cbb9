"""Lookup sets, which find rows by another column, always match the stored rows, also after repeats and crashes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import ValidationError
from redis.crc import key_slot

from cdc.errors import SinkError
from cdc.model import TableSchema
from sinks.context import SinkContext
from sinks.redis.keys import Names
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import RedisSink, open_sink
from tests.contract.test_sinks import deliver
from tests.fix_processes import wait_until
from tests.fix_servers import LocalServer, MakeRedis
from tests.scenes.histories import INTEGERS, ODD_TEXTS, TEXT, History, batch, change, cut, raw, table

ITEMS = table()
BY = {"public.items": ("label",)}


def opened(url: str, schema: TableSchema = ITEMS, **settings: Any) -> RedisSink:
    sink = open_sink(RedisSettings(url=url, **settings), SinkContext(Path("unused")))
    sink.prepare(schema)
    assert isinstance(sink, RedisSink)
    return sink


def row(key: int, version: int, label: str | None, op: str = "u", gone: list[str] | None = None) -> dict[str, Any]:
    after = None if op == "d" else f'{{"id":{key},"label":{json.dumps(label)}}}'
    return change(op, f'{{"id":{key}}}', version, after, gone)


def sets(client: redis.Redis, prefix: str = "") -> dict[str, set[str]]:
    names = [name.decode() for name in client.scan_iter(match=f"{prefix}~by:*", count=1000)]
    return {name: {bytes(member).decode() for member in members(client, name)} for name in names}


def members(client: redis.Redis, name: str) -> Any:
    return client.smembers(name)


def test_a_row_is_found_by_its_value_and_moves_with_it(redis_url: str) -> None:
    sink, client = opened(redis_url, lookups=BY), redis.Redis.from_url(redis_url)
    sink.apply(batch(ITEMS, [row(1, 10, "red"), row(2, 10, "red"), row(3, 10, None)]))
    assert sets(client) == {"~by:public.items:label:red": {"public.items:1", "public.items:2"}}
    sink.apply(batch(ITEMS, [row(1, 11, "a:b\n{c}")]))
    assert sets(client) == {
        "~by:public.items:label:red": {"public.items:2"},
        "~by:public.items:label:a%3Ab%0A%7Bc%7D": {"public.items:1"},
    }
    found: list[Any] = client.mget(members(client, "~by:public.items:label:red"))
    assert [json.loads(value)["id"] for value in found] == [2]


def test_a_deleted_row_and_an_emptied_table_leave_no_member_behind(redis_url: str) -> None:
    sink, client = opened(redis_url, lookups=BY), redis.Redis.from_url(redis_url)
    sink.apply(batch(ITEMS, [row(key, 10, "red") for key in range(5)]))
    sink.apply(batch(ITEMS, [row(0, 11, None, op="d")]))
    assert len(sets(client)["~by:public.items:label:red"]) == 4
    sink.apply(batch(ITEMS, [change("t", None, 20)]))
    assert sets(client) == {}
    sink.apply(batch(ITEMS, [row(0, 15, "stale")]))
    assert sets(client) == {}


def test_a_partial_row_stays_in_the_set_of_the_column_it_did_not_send(redis_url: str) -> None:
    sink, client = opened(redis_url, lookups={"public.items": ("label", "big")}), redis.Redis.from_url(redis_url)
    sink.apply(batch(ITEMS, [change("u", '{"id":1}', 10, '{"id":1,"label":"red","big":"large"}')]))
    sink.apply(batch(ITEMS, [change("u", '{"id":1}', 11, '{"id":1,"label":"blue"}', ["big"])]))
    assert set(sets(client)) == {"~by:public.items:label:blue", "~by:public.items:big:large"}


def test_rows_that_were_there_before_are_found_after_a_replay(redis_url: str) -> None:
    rows = [row(key, 10 + key, "red") for key in range(3)]
    opened(redis_url).apply(batch(ITEMS, rows))
    sink, client = opened(redis_url, lookups=BY), redis.Redis.from_url(redis_url)
    sink.apply(batch(ITEMS, [row(1, 5, "older")]))
    assert sets(client) == {}
    sink.apply(batch(ITEMS, rows))
    assert {len(found) for found in sets(client).values()} == {3}


def test_a_long_value_is_named_by_its_hash(redis_url: str) -> None:
    sink, client = opened(redis_url, lookups=BY), redis.Redis.from_url(redis_url)
    sink.apply(batch(ITEMS, [row(1, 10, "x" * 5000)]))
    name = Names.of(ITEMS, "", "{schema}.{table}:{key}").lookup("label", "x" * 5000)
    assert len(name) < 120
    assert sets(client) == {name: {"public.items:1"}}


class Suite:
    """The bench that `deliver` needs: this server with lookups."""

    def __init__(self, server: LocalServer, prefix: str, **settings: Any) -> None:
        self._server, self.prefix, self._settings = server, prefix, settings
        self.client = redis.Redis.from_url(server.url)

    def open(self) -> RedisSink:
        sink = open_sink(
            RedisSettings(url=self._server.url, prefix=self.prefix, **self._settings), SinkContext(Path("x"))
        )
        assert isinstance(sink, RedisSink)
        return sink

    def restart(self) -> None:
        self._server.restart()

    def versions(self, schema: TableSchema) -> dict[str, int]:
        marks = list(self.client.scan_iter(match=f"{self.prefix}~v:*", count=1000))
        return {mark.decode(): int((self.client.get(mark) or b"0")[:16], 16) for mark in marks}

    def lose(self, schema: TableSchema, key: str) -> None:
        raise NotImplementedError

    def drop(self, schema: TableSchema) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("form", ["json", "hash"])
@pytest.mark.parametrize("seed", range(4))
def test_after_any_order_of_repeats_the_sets_are_those_of_the_state(
    redis_server: LocalServer, redis_prefix: str, seed: int, form: str
) -> None:
    schema, rng = table("odd_texts", [("id", TEXT)]), random.Random(f"{seed}-{form}")
    columns = ("label", "amount", "big")
    bench = Suite(redis_server, redis_prefix, form=form, lookups={"public.odd_texts": columns})
    history = History(schema, ODD_TEXTS, rng).write(80)
    deliver(bench, schema, [batch(schema, rows) for rows in cut(history.rows, rng)], rng)
    assert sets(bench.client, redis_prefix) == expected_sets(schema, redis_prefix, history.state(), columns)


def expected_sets(
    schema: TableSchema, prefix: str, state: dict[str, str], columns: tuple[str, ...]
) -> dict[str, set[str]]:
    names = Names.of(schema, prefix, "{schema}.{table}:{key}")
    found: dict[str, set[str]] = {}
    for key, image in state.items():
        for column in columns:
            value = raw(image)[column]
            if value != "null":
                text = json.loads(value) if value.startswith('"') else value
                found.setdefault(names.lookup(column, text), set()).add(names.row(key))
    return found


def test_facts_warn_that_an_evicting_policy_harms_lookups(private_redis: MakeRedis) -> None:
    server = private_redis({"maxmemory-policy": "allkeys-lru"})
    assert "use noeviction" in opened(server.url, lookups=BY).facts()["lookups"]
    assert "lookups" not in opened(server.url).facts()


def cluster_of_one(private_redis: MakeRedis) -> str:
    server = private_redis({"cluster-enabled": "yes"})
    node = redis.Redis.from_url(server.url)
    node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)  # type: ignore[no-untyped-call]
    wait_until(lambda: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"), 30)  # type: ignore[no-untyped-call]
    return f"redis://{server.host}:{server.port}"


@pytest.mark.parametrize("template", ["{{schema}.{table}}:{key}", "{shop}:{table}:{key}"])
def test_in_a_cluster_a_hash_tag_keeps_rows_and_sets_together(private_redis: MakeRedis, template: str) -> None:
    url = cluster_of_one(private_redis)
    sink, client = opened(url, cluster=True, lookups=BY, key=template), redis.Redis.from_url(url)
    history = History(ITEMS, INTEGERS, random.Random(7)).write(60)
    for rows in cut(history.rows, random.Random(7), 20):
        sink.apply(batch(ITEMS, rows))
    assert sink.stored(ITEMS).num_rows == len(history.state())
    slots = {key_slot(name) for name in client.scan_iter() if not name.startswith(b"~t:")}
    assert len(slots) == 1
    labels = {raw(image)["label"] for image in history.state().values()} - {"null"}
    assert len(sets(client)) == len(labels)


def test_in_a_cluster_lookups_without_a_tag_are_refused_with_the_remedy(private_redis: MakeRedis) -> None:
    url = cluster_of_one(private_redis)
    with pytest.raises(SinkError, match=r"hash tag.*\{\{schema\}\.\{table\}\}:\{key\}"):
        opened(url, cluster=True, lookups=BY)


def test_a_lookup_by_an_unknown_column_is_refused(redis_url: str) -> None:
    with pytest.raises(SinkError, match=r"column 'lable', which public\.items does not have"):
        opened(redis_url, lookups={"public.items": ("lable",)})


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"ttl_seconds": 5, "lookups": BY}, "expired"),
        ({"mode": "invalidate", "lookups": BY}, "stores none"),
        ({"key": "{}:{key}"}, "hash tag"),
        ({"key": "{a}{b}:{key}"}, "hash tag"),
        ({"key": "a}:{key}"}, "hash tag"),
        ({"key": "~v:{key}"}, "reserved for Millrace"),
        ({"lookups": {"users": ("a",)}}, "schema.name"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RedisSettings(**wrong)

"""Mode `invalidate`: a cache that the application fills is never staler than the pipeline; fresh entries stay."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.errors import SinkError
from sinks.context import SinkContext
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import RedisSink, open_sink
from tests.fix_processes import wait_until
from tests.scenes.histories import batch, change, table

ITEMS = table()
FILL = """
if (redis.call('GET', KEYS[2]) or '') == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2])
end
"""
"""The guarded fill of docs/sinks.md."""


def opened(url: str, **settings: Any) -> RedisSink:
    sink = open_sink(RedisSettings(url=url, mode="invalidate", **settings), SinkContext(Path("unused")))
    sink.prepare(ITEMS)
    assert isinstance(sink, RedisSink)
    return sink


def row(key: int, version: int, op: str = "u", gone: list[str] | None = None) -> dict[str, Any]:
    return change(op, f'{{"id":{key}}}', version, None if op == "d" else f'{{"id":{key}}}', gone)


def test_a_change_deletes_the_key_and_writes_no_row(redis_url: str) -> None:
    sink, client = opened(redis_url), redis.Redis.from_url(redis_url)
    for key in range(4):
        client.set(f"public.items:{key}", "filled by the application")
    sink.apply(batch(ITEMS, [row(0, 10, "c"), row(1, 10), row(2, 10, "d")]))
    assert [client.exists(f"public.items:{key}") for key in range(4)] == [0, 0, 0, 1]


def test_a_partial_row_needs_no_stored_row(redis_url: str) -> None:
    sink, client = opened(redis_url), redis.Redis.from_url(redis_url)
    client.set("public.items:1", "old")
    sink.apply(batch(ITEMS, [row(1, 10, gone=["big"])]))
    assert not client.exists("public.items:1")


def test_a_stale_or_repeated_invalidation_keeps_a_fresh_entry(redis_url: str) -> None:
    sink, client = opened(redis_url), redis.Redis.from_url(redis_url)
    sink.apply(batch(ITEMS, [row(1, 20)]))
    client.set("public.items:1", "fresh")
    sink.apply(batch(ITEMS, [row(1, 10)]))
    sink.apply(batch(ITEMS, [row(1, 20)]))
    assert client.get("public.items:1") == b"fresh"


def test_a_truncate_empties_the_cache_of_the_table_only(redis_url: str) -> None:
    sink, client = opened(redis_url), redis.Redis.from_url(redis_url)
    for name in ("public.items:1", "public.items:2", "public.other:1"):
        client.set(name, "filled")
    sink.apply(batch(ITEMS, [change("t", None, 20)]))
    assert [client.exists(name) for name in ("public.items:1", "public.items:2", "public.other:1")] == [0, 0, 1]


def test_a_truncate_keeps_keys_that_no_row_of_the_table_can_have(redis_url: str) -> None:
    sink, client = opened(redis_url, keys={"public.items": "item:{key}"}), redis.Redis.from_url(redis_url)
    others: list[str | bytes] = ["item:42:cart", "item:settings", b"item:\xff", "item:4 2", "items:1"]
    for name in ("item:42", "item:-7", *others):
        client.set(name, "filled by the application")
    sink.apply(batch(ITEMS, [row(42, 10)]))
    client.set("item:42", "filled again")
    sink.apply(batch(ITEMS, [change("t", None, 20)]))
    assert not client.exists("item:42", "item:-7")
    assert client.exists(*others) == len(others)


@pytest.mark.parametrize("mode", ["invalidate", "rows"])
def test_the_changed_keys_are_published_once_each(redis_url: str, mode: Any) -> None:
    sink = open_sink(RedisSettings(url=redis_url, mode=mode, channel="changes"), SinkContext(Path("unused")))
    sink.prepare(ITEMS)
    listener = redis.Redis.from_url(redis_url).pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
    listener.subscribe("changes")
    listener.get_message(timeout=5)
    for _ in range(2):
        sink.apply(batch(ITEMS, [row(1, 10), row(2, 10, "d")]))
    sink.apply(batch(ITEMS, [row(3, 11)]))
    published: list[str] = []

    def last_is_published() -> bool:
        if message := listener.get_message(timeout=0.1):
            published.append(message["data"].decode())
        return "public.items:3" in published

    wait_until(last_is_published, 10)
    assert sorted(published) == ["public.items:1", "public.items:2", "public.items:3"]


def test_verify_is_refused_with_a_message(redis_url: str) -> None:
    with pytest.raises(SinkError, match=r"only invalidates.*verify --sink"):
        opened(redis_url).stored(ITEMS)


@dataclass
class Application:
    """Reads through the cache; `reading` are reads between their database query and their fill."""

    client: redis.Redis
    rows: dict[int, int] = field(default_factory=dict)
    reading: list[tuple[int, bytes | str, int | None]] = field(default_factory=list)

    def begin(self, key: int) -> None:
        if self.client.get(f"public.items:{key}") is None:
            mark = self.client.get(f"~v:{{public.items:{key}}}") or b""
            self.reading.append((key, mark, self.rows.get(key)))

    def finish(self, rng: random.Random) -> None:
        key, mark, value = self.reading.pop(rng.randrange(len(self.reading)))
        if value is not None:
            self.client.eval(FILL, 2, f"public.items:{key}", f"~v:{{public.items:{key}}}", mark, value)


@pytest.mark.parametrize("seed", range(6))
def test_a_guarded_fill_is_never_staler_than_the_pipeline(redis_url: str, seed: int) -> None:
    rng, sink = random.Random(seed), opened(redis_url)
    application = Application(redis.Redis.from_url(redis_url))
    written: list[dict[str, Any]] = []
    applied = 0
    for version in range(1, 150):
        key, chance = rng.randrange(4), rng.random()
        if chance < 0.3:
            deleted = rng.random() < 0.2 and key in application.rows
            application.rows.pop(key, None)
            if not deleted:
                application.rows[key] = version
            written.append(row(key, version, "d" if deleted else "u"))
        elif chance < 0.6:
            application.begin(key)
        elif chance < 0.8 and application.reading:
            application.finish(rng)
        else:
            start = rng.randint(0, applied)
            end = rng.randint(applied, len(written))
            sink.apply(batch(ITEMS, written[start:end]))
            applied = end
    while application.reading:
        application.finish(rng)
    sink.apply(batch(ITEMS, written))
    for key in range(4):
        cached = application.client.get(f"public.items:{key}")
        assert cached is None or int(cached) == application.rows[key]

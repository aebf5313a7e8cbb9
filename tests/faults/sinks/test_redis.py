"""Redis faults: full, busy, read-only, restarted, evicting, disconnected."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.config.secret import Secret
from cdc.errors import Busy, Lost, Rejected, SinkError
from sinks.context import SinkContext
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import open_sink
from tests.contract.test_sinks import check
from tests.fix_processes import wait_until
from tests.fix_proxy import MakeProxy
from tests.fix_servers import LocalServer, MakeRedis
from tests.scenes.histories import History, batch, cut, labelled, state_of, table

ITEMS = table()
CONTEXT = SinkContext(Path("unused"))
LARGE = "x" * 500


def opened(url: str, **settings: Any) -> Any:
    sink = open_sink(RedisSettings(url=url, **settings), CONTEXT)
    sink.prepare(ITEMS)
    return sink


def test_a_batch_waits_for_a_full_redis_and_is_then_complete(private_redis: MakeRedis) -> None:
    server = private_redis({"maxmemory": "4mb", "maxmemory-policy": "noeviction"})
    sink = opened(server.url)
    full = batch(ITEMS, labelled(20_000, 10, LARGE))
    with pytest.raises(Busy, match="out of memory") as caught:
        sink.apply(full)
    assert "maxmemory" in caught.value.remedy
    redis.Redis.from_url(server.url).config_set("maxmemory", "0")
    sink.apply(full)
    assert sink.stored(ITEMS).num_rows == 20_000


def test_a_flushed_script_is_loaded_again(redis_url: str) -> None:
    sink = opened(redis_url)
    redis.Redis.from_url(redis_url).script_flush()
    sink.apply(batch(ITEMS, labelled(3, 10)))
    assert sink.stored(ITEMS).num_rows == 3


def test_a_batch_waits_for_a_read_only_replica(private_redis: MakeRedis, redis_server: LocalServer) -> None:
    server = private_redis()
    sink = opened(server.url)
    client = redis.Redis.from_url(server.url)
    client.replicaof(redis_server.host, redis_server.port)
    wait_until(lambda: client.info("replication")["master_link_status"] == "up", 30)
    with pytest.raises(Busy, match="read-only replica"):
        sink.apply(batch(ITEMS, labelled(3, 10)))
    client.replicaof("NO", "ONE")
    sink.apply(batch(ITEMS, labelled(3, 10)))
    assert sink.stored(ITEMS).num_rows == 3


def test_a_connection_that_ended_while_idle_is_lost_before_anything_is_written(
    redis_url: str, proxy: MakeProxy
) -> None:
    """A new connection may lead to another server, which lacks acknowledged writes."""
    port, number = redis_url.rpartition(":")[2].split("/")
    between = proxy(int(port))
    sink = opened(f"redis://127.0.0.1:{between.port}/{number}")
    sink.apply(batch(ITEMS, labelled(1, 10)))
    between.reset()
    with pytest.raises(Lost):
        sink.apply(batch(ITEMS, labelled(1, 20, "newer")))
    check(opened(redis_url), state_of(labelled(1, 10)))


def test_a_batch_waits_for_an_endless_script_of_another_client(private_redis: MakeRedis) -> None:
    server = private_redis({"busy-reply-threshold": "50"})
    sink = opened(server.url)
    endless = threading.Thread(target=_endless, args=(server.url,))
    endless.start()
    client = redis.Redis.from_url(server.url)
    wait_until(lambda: _is_busy(client), 30)
    with pytest.raises(Busy, match="BUSY"):
        sink.apply(batch(ITEMS, labelled(3, 10)))
    client.script_kill()
    endless.join(30)
    sink.apply(batch(ITEMS, labelled(3, 10)))
    assert sink.stored(ITEMS).num_rows == 3


def _endless(url: str) -> None:
    with pytest.raises(redis.ResponseError):
        redis.Redis.from_url(url).eval("while true do end", 0)


def _is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


def test_a_batch_waits_for_a_server_that_loads_its_data(private_redis: MakeRedis) -> None:
    # a hundredth of a second for each key, and an answer to clients in between
    slow = {"key-load-delay": "10000", "loading-process-events-interval-bytes": "1024"}
    server = private_redis({"appendonly": "no", **slow})
    sink = opened(server.url)
    sink.apply(batch(ITEMS, labelled(200, 10, LARGE)))
    redis.Redis.from_url(server.url).save()
    server.kill()
    messages: list[str] = []
    applying = threading.Thread(target=_apply_at_last, args=(server.url, messages))
    applying.start()
    server.start()
    applying.join(60)
    assert any("is loading its data (LOADING)" in message for message in messages)
    check(opened(server.url), state_of(labelled(200, 20, "newer")))


def _apply_at_last(url: str, messages: list[str]) -> None:
    deadline, sink = time.monotonic() + 60, None
    while time.monotonic() < deadline:
        try:
            sink = sink or opened(url)
            sink.apply(batch(ITEMS, labelled(200, 20, "newer")))
        except (Busy, Lost) as error:
            sink = None if isinstance(error, Lost) else sink
            messages.append(str(error))
            time.sleep(0.02)
        else:
            return


def test_wrong_credentials_stop_with_a_remedy_and_without_the_secret(private_redis: MakeRedis) -> None:
    server = private_redis()
    redis.Redis.from_url(server.url).config_set("requirepass", "the-true-one")
    with pytest.raises(SinkError) as caught:
        open_sink(RedisSettings(url=server.url, password=Secret("planted-wrong-one")), CONTEXT)
    assert not caught.value.transient
    assert "planted-wrong-one" not in str(caught.value)
    assert "password" in caught.value.remedy


def test_facts_show_eviction_and_a_replay_restores_the_state_of_the_source(private_redis: MakeRedis) -> None:
    server = private_redis({"maxmemory-policy": "allkeys-lru"})
    sink = opened(server.url)
    assert sink.facts() == {"eviction policy": "allkeys-lru"}
    history = History(ITEMS, [{"id": str(key)} for key in range(1500)], random.Random(5)).write(2500)
    whole = [batch(ITEMS, part) for part in cut(history.rows, random.Random(5), 300)]
    client = redis.Redis.from_url(server.url)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 300_000)
    for part in whole:
        _apply_without_evicted(sink, part)
    assert client.info("stats")["evicted_keys"] > 0
    client.config_set("maxmemory", "0")
    for part in whole:
        _apply_without_evicted(sink, part)
    check(sink, history.state())


def _apply_without_evicted(sink: Any, part: Any) -> None:
    """A partial row whose stored row was evicted is rejected; the query then reads it from the source."""
    try:
        sink.apply(part)
    except Rejected as rejected:
        assert {item.reason for item in rejected.items} == {"stored row missing"}


def test_a_killed_redis_is_lost_and_complete_after_its_return(private_redis: MakeRedis) -> None:
    server = private_redis({"appendfsync": "always"})
    sink = opened(server.url)
    sink.apply(batch(ITEMS, labelled(100, 10)))
    server.kill()
    with pytest.raises(Lost):
        sink.apply(batch(ITEMS, labelled(100, 20, "newer")))
    server.start()
    again = opened(server.url)
    again.apply(batch(ITEMS, labelled(100, 10)))
    again.apply(batch(ITEMS, labelled(100, 20, "newer")))
    check(again, state_of(labelled(100, 20, "newer")))


def test_a_replay_restores_writes_that_a_failover_lost(private_redis: MakeRedis) -> None:
    primary, replica = private_redis(), private_redis()
    follower = redis.Redis.from_url(replica.url)
    follower.replicaof(primary.host, primary.port)
    wait_until(lambda: follower.info("replication")["master_link_status"] == "up", 30)
    sink = opened(primary.url)
    sink.apply(batch(ITEMS, labelled(50, 10)))
    wait_until(lambda: follower.dbsize() == 100, 30)
    follower.replicaof("NO", "ONE")  # promoted before it got the rest
    sink.apply(batch(ITEMS, labelled(50, 20, "newer")))
    promoted = opened(replica.url)
    state = state_of(labelled(50, 20, "newer"))
    with pytest.raises(AssertionError):
        check(promoted, state)
    for version, label in ((10, "x"), (20, "newer")):
        promoted.apply(batch(ITEMS, labelled(50, version, label)))
    check(promoted, state)

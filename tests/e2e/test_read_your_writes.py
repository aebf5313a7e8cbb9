"""A program that waits for its own write never reads an older row: five thousand writes, no stale read, also while two
hundred slow clients hold connections to the endpoint."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
import redis

from cdc.client import Freshness, Stale
from cdc.errors import ConfigError
from tests.fix_pipeline import Pipeline
from tests.fix_processes import wait_until

pytestmark = pytest.mark.spark

_WRITERS = 20
_ROWS = 25
_DOCS = Path(__file__).parents[2] / "docs" / "http.md"
Read = Callable[[int], int]


@pytest.fixture(scope="module")
def running(shared_pipeline: Pipeline) -> Iterator[Pipeline]:
    """The shop's pipeline, with a row for every writer and turn."""
    pipeline = shared_pipeline
    with pipeline.database.connect() as owner:
        owner.execute(
            "insert into products (sku, title, price, stock)"
            " select 'own-' || n, 'written and read', 1, 0 from generate_series(1, %s) n",
            (_WRITERS * _ROWS,),
        )
    daemon = pipeline.start()
    pipeline.settle()
    yield pipeline
    os.killpg(daemon.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
    assert daemon.wait(60) == 0
    assert "Traceback" not in daemon.said()


def address(pipeline: Pipeline) -> str:
    return f"http://127.0.0.1:{pipeline.settings.http.port}"


def in_redis(pipeline: Pipeline) -> Read:
    url = next(sink.url for sink in pipeline.settings.sinks if sink.kind == "redis")  # type: ignore[attr-defined]
    client = redis.Redis.from_url(url)
    return lambda key: int(json.loads(client.get(f"public.products:{key}") or "{}")["stock"])


def in_opensearch(pipeline: Pipeline) -> Read:
    sink = next(sink for sink in pipeline.settings.sinks if sink.kind == "opensearch")
    client = httpx.Client(base_url=sink.url, trust_env=False, timeout=30)  # type: ignore[attr-defined]
    index = f"{sink.prefix}public.products"  # type: ignore[attr-defined]
    return lambda key: int(client.get(f"/{index}/_doc/{key}").raise_for_status().json()["_source"]["stock"])


def write_and_read(pipeline: Pipeline, rounds: range, writer: int, keys: list[int]) -> list[str]:
    """A round writes each row in a transaction of its own, then waits for and reads each; returns the stale reads."""
    sink = "opensearch" if writer % 5 == 0 else "redis"
    read = in_opensearch(pipeline) if sink == "opensearch" else in_redis(pipeline)
    stale = []
    with pipeline.database.connect() as connection, Freshness(address(pipeline), sink) as fresh:
        if writer % 4 == 1:
            connection.execute("set synchronous_commit = off")
        for turn in rounds:
            written = []
            for key in keys:
                connection.execute("update products set stock = %s where id = %s", (turn, key))
                written.append((key, fresh.position(connection)))
            for key, position in written:
                fresh.wait(position, 60)
                if (found := read(key)) != turn:
                    stale.append(f"{sink} had {found} for {key} in turn {turn}")
    return stale


@contextmanager
def slow_clients(pipeline: Pipeline) -> Iterator[None]:
    """Two hundred others that begin requests and never end them, as often as they are thrown out."""
    stop = threading.Event()

    def bother() -> None:
        while not stop.is_set():
            held = [socket.create_connection(("127.0.0.1", pipeline.settings.http.port)) for _ in range(200)]
            for connection in held:
                connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
            worst.append(_livez_seconds(pipeline))
            stop.wait(9)
            for connection in held:
                connection.close()

    worst: list[float] = []
    thread = threading.Thread(target=bother)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert worst
    assert max(worst) < 60


def _livez_seconds(pipeline: Pipeline) -> float:
    before = time.monotonic()
    try:
        httpx.get(f"{address(pipeline)}/livez", trust_env=False, timeout=60).raise_for_status()
    except httpx.HTTPError:
        return float("inf")
    return time.monotonic() - before


@pytest.mark.parametrize("rounds", [range(1, 4), pytest.param(range(4, 14), marks=pytest.mark.soak)], ids=len)
def test_thousands_of_writes_are_each_read_back_and_none_is_stale(running: Pipeline, rounds: range) -> None:
    with running.database.connect() as owner:
        rows = owner.execute("select id from products where sku like 'own-%' order by id").fetchall()
    keys = [int(row[0]) for row in rows]
    shares = [keys[writer * _ROWS : (writer + 1) * _ROWS] for writer in range(_WRITERS)]
    with slow_clients(running), ThreadPoolExecutor(_WRITERS) as pool:
        found = list(pool.map(lambda item: write_and_read(running, rounds, *item), enumerate(shares)))
    assert len(keys) == _WRITERS * _ROWS
    assert [line for lines in found for line in lines] == []


def test_the_documented_example_reads_what_it_wrote_and_a_store_that_does_not_follow_is_stale(
    running: Pipeline, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", _DOCS.read_text(encoding="utf-8"), re.DOTALL)
    url = next(sink.url for sink in running.settings.sinks if sink.kind == "redis")  # type: ignore[attr-defined]
    client = redis.Redis.from_url(url)
    dsn = running.database.server.dsn(running.database.name)
    placed = example.replace("http://127.0.0.1:8080", address(running)).replace("dbname=shop", dsn)
    with monkeypatch.context() as patched:
        patched.setattr(redis, "Redis", lambda: client)
        exec(compile(placed, "docs/http.md", "exec"), {})
    assert "new@example.org" in capsys.readouterr().out
    _refuse_what_would_be_stale(running)


def _refuse_what_would_be_stale(running: Pipeline) -> None:
    """A paused store is waited for in vain, and an open transaction not at all."""
    httpx.post(f"{address(running)}/v1/pause", json={"target": "redis"}, trust_env=False).raise_for_status()
    status = f"{address(running)}/v1/status"
    wait_until(lambda: _state(status) == "paused", 30, "redis paused")
    with psycopg.connect(running.database.server.dsn(running.database.name)) as connection:
        connection.execute("update products set stock = -1 where id = 1")
        with Freshness(address(running), "redis") as fresh:
            with pytest.raises(ConfigError, match="Commit first"):
                fresh.after(connection)
            connection.commit()
            with pytest.raises(Stale, match="redis"):
                fresh.after(connection, timeout=1)
            resumed = threading.Timer(0.5, lambda: _resume(running))
            resumed.start()
            fresh.after(connection, timeout=60)
            resumed.join()
    assert in_redis(running)(1) == -1


def _state(url: str) -> str:
    return str(httpx.get(url, trust_env=False).json()["apply"]["sinks"]["redis"]["state"])


def _resume(pipeline: Pipeline) -> None:
    httpx.post(f"{address(pipeline)}/v1/resume", json={"target": "redis"}, trust_env=False).raise_for_status()

"""Stores behind a connection that breaks: in the middle of a request, before its reply, all the time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cdc.errors import Lost
from cdc.ports import Sink
from sinks.context import SinkContext
from sinks.opensearch import sink as opensearch
from sinks.opensearch.settings import OpenSearchSettings
from sinks.redis import sink as redis
from sinks.redis.settings import RedisSettings
from tests.contract.test_sinks import check
from tests.fix_proxy import MakeProxy, Proxy
from tests.scenes.histories import batch, labelled, state_of, table

ITEMS = table()


@dataclass
class Wire:
    """A sink, the way to its store, how many bytes pass before a break, and how many connections it keeps."""

    open: Callable[[], Sink]
    sink: Sink
    between: Proxy
    between_breaks: int
    kept: int

    def breaks(self) -> None:
        self.between.cut_after(self.between_breaks, "up")

    def reopen(self) -> None:
        """As is done after every Lost; repeated while the connection breaks meanwhile."""
        self.sink.close()
        for _ in range(50):
            try:
                self.sink = self.open()
                return
            except Lost:
                continue
        raise AssertionError("the store could not be opened again")


def _opensearch(port: int, prefix: str) -> Sink:
    """With several requests for each batch."""
    settings = OpenSearchSettings(url=f"http://127.0.0.1:{port}", prefix=prefix, replicas=0, bulk_mb=0.1)
    return opensearch.open_sink(settings, SinkContext(Path("unused")))


def _redis(port: int, prefix: str) -> Sink:
    """With several requests for each batch."""
    settings = RedisSettings(url=f"redis://127.0.0.1:{port}", prefix=prefix, chunk=20)
    return redis.open_sink(settings, SinkContext(Path("unused")))


Open = Callable[[int, str], Sink]
STORES: list[tuple[str, str, Open, int, int]] = [
    ("opensearch_server", "index_prefix", _opensearch, 60_000, 40),
    ("redis_server", "redis_prefix", _redis, 30_000, 10),
]


@pytest.fixture(params=STORES, ids=["opensearch", "redis"])
def wire(request: pytest.FixtureRequest, proxy: MakeProxy) -> Wire:
    server, prefix, open_sink, between_breaks, kept = request.param
    between = proxy(request.getfixturevalue(server).port)
    opened = partial(open_sink, between.port, request.getfixturevalue(prefix))
    sink = opened()
    sink.prepare(ITEMS)
    return Wire(opened, sink, between, between_breaks, kept)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_lost_reply_makes_the_repeat_a_no_op(wire: Wire, direction: Any) -> None:
    rows = labelled(500, 10, "x" * 500)
    wire.between.cut_after(1 if direction == "down" else 20_000, direction)
    with pytest.raises(Lost):
        wire.sink.apply(batch(ITEMS, rows))
    wire.reopen()
    wire.sink.prepare(ITEMS)
    wire.sink.apply(batch(ITEMS, rows))
    wire.sink.apply(batch(ITEMS, labelled(250, 5, "stale")))
    check(wire.sink, state_of(rows))


def test_a_connection_that_breaks_all_the_time_makes_progress(wire: Wire) -> None:
    lost = 0
    wire.breaks()
    for version in range(10, 40):
        for _ in range(50):
            try:
                wire.sink.prepare(ITEMS)
                wire.sink.apply(batch(ITEMS, labelled(100, version, f"at {version}")))
                break
            except Lost:
                lost += 1
                wire.breaks()
                wire.reopen()
    assert lost > 3
    assert wire.between.connections < wire.kept + 2 * lost
    wire.between.pass_on()
    wire.reopen()
    check(wire.sink, state_of(labelled(100, 39, "at 39")))

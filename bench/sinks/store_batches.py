"""The cost of a batch in Redis and OpenSearch by the size of the batch and of the table.

`measure` returns `bench.sinks.batches.costs`, with the server's CPU, for each store and size of table. It starts and
stops the servers; OpenSearch runs with the full compiler, not with the quick start of the tests.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import cpu_meter, fill
from bench.environment import workspace
from bench.sinks.batches import SIZES, TABLE, Costs, costs, filled
from cdc.ports import Sink
from deploy.local.opensearch import OpenSearch
from deploy.local.redis import Redis
from deploy.local.server import Server
from sinks.context import SinkContext
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.sink import open_sink as open_opensearch
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import open_sink as open_redis

_CONTEXT = SinkContext(Path("unused"))


@dataclass(frozen=True, slots=True)
class Opened:
    """A sink, and a function that fills its table quickly."""

    sink: Sink
    fill: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Store:
    """A server, and how to open the sink at its address."""

    server: Server
    open: Callable[[str], Opened]


def _redis(url: str) -> Opened:
    settings = RedisSettings(url=url)
    sink = open_redis(settings, _CONTEXT)
    return Opened(sink, partial(fill.redis, sink, settings))


def _opensearch(url: str) -> Opened:
    settings = OpenSearchSettings(url=url, replicas=0)
    return Opened(open_opensearch(settings, _CONTEXT), partial(fill.opensearch, settings))


STORES: Mapping[str, Store] = {
    "redis": Store(Redis({"appendonly": "no"}), _redis),
    "opensearch": Store(OpenSearch(heap="1g", quick=False), _opensearch),
}


def measure(
    tables: Sequence[int], batches: Sequence[int], runs: int = 3, stores: Sequence[str] = tuple(STORES)
) -> dict[str, dict[str, Costs]]:
    """Fill each table once, then apply batches of each size to it, small ones first."""
    return {name: _of_store(STORES[name], tables, batches, runs) for name in stores}


def _of_store(store: Store, tables: Sequence[int], batches: Sequence[int], runs: int) -> dict[str, Costs]:
    """Measure every size of table in a new server."""
    found = {}
    for rows in tables:
        with workspace("batches", store.server) as space:
            running = space.up(store.server.name)[store.server.name]
            opened = store.open(running.address)
            opened.sink.prepare(TABLE)
            filled(store.server.name, rows, opened.fill)
            found[str(rows)] = costs(opened.sink, rows, batches, runs, partial(cpu_meter.cpu_seconds, running.pid))
            opened.sink.close()
    return found


def main() -> None:
    """Print the costs as JSON: python -m bench.sinks.store_batches [largest table [store]]."""
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    stores = sys.argv[2:] or tuple(STORES)
    sys.stdout.write(json.dumps(measure((100_000, largest), SIZES, stores=stores), indent=1) + "\n")


if __name__ == "__main__":
    main()

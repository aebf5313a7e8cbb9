"""What a batch costs in Redis and OpenSearch, by its size and by the size of the table.

`measure` gives for each store and each size of table what `bench.batches.costs` tells, the server's CPU included. The
servers are started for it and gone afterwards; OpenSearch runs with the full compiler, without the quick start of the
tests.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench import meter
from bench.batches import SIZES, TABLE, Costs, batch_of, costs
from bench.ground import ground
from cdc.errors import Busy, Lost
from cdc.ports import Batch, Sink
from deploy.local.opensearch import OpenSearch
from deploy.local.redis import Redis
from deploy.local.server import Server
from sinks.context import SinkContext
from sinks.opensearch import open_sink as open_opensearch
from sinks.opensearch_settings import OpenSearchSettings
from sinks.redis import open_sink as open_redis
from sinks.redis_settings import RedisSettings

_CHUNK = 20_000
_ATTEMPTS = 20
_CONTEXT = SinkContext(Path("unused"))


@dataclass(frozen=True, slots=True)
class Store:
    """A server, and the sink that writes to it; `prefix` keeps tables of different sizes apart."""

    server: Server
    open: Callable[[str, str], Sink]


STORES: Mapping[str, Store] = {
    "redis": Store(
        Redis({"appendonly": "no"}),
        lambda url, prefix: open_redis(RedisSettings(url=url, prefix=f"{prefix}:"), _CONTEXT),
    ),
    "opensearch": Store(
        OpenSearch(heap="1g", quick=False),
        lambda url, prefix: open_opensearch(OpenSearchSettings(url=url, prefix=f"{prefix}-", replicas=0), _CONTEXT),
    ),
}


def measure(
    tables: Sequence[int], batches: Sequence[int], runs: int = 3, stores: Sequence[str] = tuple(STORES)
) -> dict[str, dict[str, Costs]]:
    """Fill each table once, then apply batches of each size to it, small ones first. Ten million rows take Redis three
    minutes and 5 GB, OpenSearch a quarter of an hour."""
    return {name: _of_store(STORES[name], tables, batches, runs) for name in stores}


def _of_store(store: Store, tables: Sequence[int], batches: Sequence[int], runs: int) -> dict[str, Costs]:
    found = {}
    for rows in tables:
        with ground("batches", store.server) as place:
            running = place.up(store.server.name)[store.server.name]
            sink = store.open(running.address, f"b{rows}")
            sink.prepare(TABLE)
            for start in range(0, rows, _CHUNK):
                _fill(sink, batch_of(np.arange(start, min(rows, start + _CHUNK)), 100))
            found[str(rows)] = costs(sink, rows, batches, runs, partial(meter.cpu_seconds, running.pid))
            sink.close()
    return found


def _fill(sink: Sink, batch: Batch) -> None:
    """A busy machine may make a store miss its time; a repeat changes nothing."""
    for _ in range(_ATTEMPTS):
        try:
            return sink.apply(batch)
        except (Busy, Lost):
            time.sleep(2)
    raise RuntimeError("the store takes no rows")


def main() -> None:
    """Print the costs as JSON: python -m bench.store_batches [largest table [store]]."""
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    stores = sys.argv[2:] or tuple(STORES)
    sys.stdout.write(json.dumps(measure((100_000, largest), SIZES, stores=stores), indent=1) + "\n")


if __name__ == "__main__":
    main()

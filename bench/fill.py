"""Fills a store with ten million rows in minutes, with the same result as the sink but without it.

Names, documents and versions follow the sink's rules, are built column by column and sent in large requests. `redis`
and `opensearch` raise RuntimeError if the result differs from what the sink writes.
"""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from redis import Redis

from bench import cpu_meter
from bench.sinks.batches import TABLE, batch_of, joined
from cdc.arrays import AnyArray, Ints
from cdc.ports import Sink
from sinks.opensearch.documents import Documents
from sinks.opensearch.mapping import index_name
from sinks.opensearch.settings import OpenSearchSettings
from sinks.redis.keys import Names
from sinks.redis.settings import RedisSettings

_CHUNK = 100_000
_VERSION = 100
_PAIRS = 500
"""Rows in one MSET: the server does nothing else during a call."""
_DOCUMENTS = 5_000
_QUICK = {"refresh_interval": "-1", "translog.durability": "async", "translog.flush_threshold_size": "2gb"}
_ATTEMPTS = 20
_BUSY = (429, 503)
_THERE, _REJECTED = "version_conflict_engine_exception", "opensearch_rejected_execution_exception"
_SENDERS = 3
"""Requests in flight at once: one is built while the server processes the others."""


def redis(sink: Sink, settings: RedisSettings, rows: int) -> None:
    """Each row and its version, in the form of JSON texts without a lifetime."""
    names = Names.of(TABLE, settings.prefix, settings.template(TABLE.table))
    address = urlsplit(settings.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        for ids in _chunks(rows):
            sent = _sent(connection, _pairs(names, ids))
            _expect(connection, b"+OK\r\n" * sent)
    client = Redis.from_url(settings.url)
    try:
        _check_redis(client, sink, names)
    finally:
        client.close()


def _check_redis(client: Redis, sink: Sink, names: Names) -> None:
    row = names.row('{"id":7}')
    both = (row, names.version(row))
    quick = [client.dump(name) for name in both]
    client.delete(*both)
    sink.apply(batch_of(np.array([7]), _VERSION))
    if None in quick or [client.dump(name) for name in both] != quick:
        raise RuntimeError("the filled table differs from what the sink writes")


def _pairs(names: Names, ids: Ints) -> AnyArray:
    """For each row, its part of an MSET in Redis's protocol."""
    name = joined(names.before, pc.cast(pa.array(ids), pa.string()), names.after)
    mark = joined(names.mark, name, names.mark_end)
    value = batch_of(ids, _VERSION).rows["after"].combine_chunks()
    parts = [piece for text in (name, value, mark) for piece in ("$", _length(text), "\r\n", text, "\r\n")]
    return joined(*parts, f"$16\r\n{_VERSION:016x}\r\n")


def _sent(connection: socket.socket, pairs: AnyArray) -> int:
    """Send the rows in calls of so many; returns how many calls that were."""
    calls = 0
    for body, count in _bodies(pairs, _PAIRS):
        connection.sendall(b"*%d\r\n$4\r\nMSET\r\n" % (1 + 4 * count))
        connection.sendall(body)
        calls += 1
    return calls


def _expect(connection: socket.socket, wanted: bytes) -> None:
    answer = b""
    while len(answer) < len(wanted) and (more := connection.recv(65536)):
        answer += more
    if answer != wanted:
        raise RuntimeError("Redis refused rows")


def opensearch(settings: OpenSearchSettings, rows: int) -> None:
    """Documents with their versions, in an index without refreshes; waits until its merges have ended."""
    alias = index_name(settings.prefix, TABLE.table)
    at = urlsplit(settings.url).netloc
    _ask(at, "PUT", f"/{alias}/_settings", {"index": _QUICK})
    with ThreadPoolExecutor(_SENDERS) as senders:
        for ids in _chunks(rows):
            documents = _documents(Documents(settings.metadata), ids)
            list(senders.map(lambda part: _write(at, alias, part[0]), _bodies(documents, _DOCUMENTS)))
    _ask(at, "PUT", f"/{alias}/_settings", {"index": dict.fromkeys(_QUICK)})
    _ask(at, "POST", f"/{alias}/_flush")
    _ask(at, "POST", f"/{alias}/_refresh")
    cpu_meter.wait(lambda: not _merging(at, alias), "merges to end", 900, 1.0)
    if _ask(at, "GET", f"/{alias}/_count")["count"] != rows:
        raise RuntimeError("OpenSearch lacks rows")


def _merging(at: str, alias: str) -> bool:
    return bool(_ask(at, "GET", f"/{alias}/_stats/merge")["_all"]["total"]["merges"]["current"])


def _documents(documents: Documents, ids: Ints) -> AnyArray:
    """For each row, its lines of a bulk request."""
    text = pc.cast(pa.array(ids), pa.string())
    image = batch_of(ids, _VERSION).rows["after"].combine_chunks().cast(pa.binary())
    opened: AnyArray = pc.binary_slice(image, 0, -1)
    mark = documents.live(b"{}", _VERSION).decode()[1:]
    head = f'","version":{_VERSION},"version_type":"external"}}}}\n'
    return joined('{"index":{"_id":"', text, head, opened.cast(pa.string()), ",", mark, "\n")


def _write(at: str, alias: str, body: memoryview) -> None:
    """Send documents until the server accepts all; those it rejects while it is busy are sent again."""
    for attempt in range(_ATTEMPTS):
        status, answer = _asked(at, "POST", f"/{alias}/_bulk?filter_path=items.*.error.type", bytes(body))
        kinds = {item["index"]["error"]["type"] for item in answer.get("items", ())} - {_THERE}
        if status < 300 and not kinds:
            return
        if status not in _BUSY and kinds != {_REJECTED}:
            raise RuntimeError(f"OpenSearch refuses rows ({status})")
        time.sleep(0.2 * (attempt + 1))
    raise RuntimeError("OpenSearch has no room for rows")


def _ask(at: str, method: str, path: str, body: "dict[str, Any] | None" = None) -> dict[str, Any]:
    status, answer = _asked(at, method, path, json.dumps(body).encode() if body else None)
    if status >= 300:
        raise RuntimeError(f"OpenSearch answers {status} to {method} {path}")
    return answer


def _asked(at: str, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(at, timeout=600)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def _chunks(rows: int) -> Iterator[Ints]:
    for start in range(0, rows, _CHUNK):
        yield np.arange(start, min(rows, start + _CHUNK))


def _bodies(texts: AnyArray, count: int) -> Iterator[tuple[memoryview, int]]:
    """So many texts at a time as one run of bytes, and how many they are: Arrow holds them side by side."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)
    data = memoryview(texts.buffers()[2])
    for start in range(0, len(texts), count):
        end = min(len(texts), start + count)
        yield data[offsets[start] : offsets[end]], end - start


def _length(texts: AnyArray) -> AnyArray:
    return pc.cast(pc.binary_length(texts), pa.string())

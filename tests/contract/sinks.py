"""A bench for each kind of sink: what the contract suite needs beyond the sink itself.

To put a new kind under the suite, write its bench and add one line to BENCHES.
"""

import json
import random
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest
import redis
from deltalake import DeltaTable

from cdc.config.settings import TableShape
from cdc.model import TableId, TableSchema
from cdc.ports import Sink
from sinks import memory
from sinks.context import SinkContext
from sinks.delta import sink
from sinks.delta.settings import DeltaSettings
from sinks.opensearch.mapping import document_id, id_prefix, index_name
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.sink import open_sink as open_opensearch
from sinks.redis.keys import Names
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import open_sink as open_redis
from tests.fix_delta import mark_everywhere, remove_prefix
from tests.fix_s3 import S3Server
from tests.fix_servers import opensearch_request
from tests.scenes.staged_sink import StagedSink


class Bench(Protocol):
    """One empty store for one test."""

    def open(self) -> Sink:
        """A new sink on the store: what a restart of ours does. The old one may not have been closed."""

    def restart(self) -> None:
        """Stop and start the store, keeping its data. Nothing to do for a store without a server."""

    def versions(self, schema: TableSchema) -> dict[str, int]:
        """Every key that the store remembers, deleted ones too, with the version it holds."""

    def lose(self, schema: TableSchema, key: str) -> None:
        """Take a row away behind the sink's back, as an eviction or a rebuilt index would."""

    def drop(self, schema: TableSchema) -> None:
        """Take the whole table away behind the sink's back."""


TABLES = ("items", "ints", "odd_texts", "pairs")
"""The tables of the suite's histories."""


class MemoryBench:
    """The in-process store."""

    def __init__(self) -> None:
        self._settings = memory.MemorySettings(name=f"memory-{uuid.uuid4().hex[:8]}")
        self._context = SinkContext(Path("unused"))

    def open(self) -> Sink:
        return memory.open_sink(self._settings, self._context)

    def restart(self) -> None:
        """It lives in this process."""

    def versions(self, schema: TableSchema) -> dict[str, int]:
        rows = memory._STORES[self._settings.name][str(schema.table)].rows
        return {key: row.version for key, row in rows.items()}

    def lose(self, schema: TableSchema, key: str) -> None:
        del memory._STORES[self._settings.name][str(schema.table)].rows[key]

    def drop(self, schema: TableSchema) -> None:
        del memory._STORES[self._settings.name][str(schema.table)]


class DeltaBench:
    """A folder of Delta tables."""

    def __init__(self, folder: Path, path: str = "", options: dict[str, str] | None = None) -> None:
        as_text = {TableId("public", name): ("at",) for name in TABLES}  # the histories hold infinity and BC
        self._options = options
        self._settings = DeltaSettings.model_validate(
            {"path": path or str(folder / "lake"), "as_text": as_text, "storage_options": options or {}}
        )
        self._context = SinkContext(folder)

    def open(self) -> Sink:
        return self._open()

    def _open(self) -> sink.DeltaSink:
        return sink.open_sink(self._settings, self._context)

    def restart(self) -> None:
        """A folder has no server."""

    def versions(self, schema: TableSchema) -> dict[str, int]:
        names = [column.name for column in schema.key]
        scan = self._table(schema).scan(columns=[*names, "_millrace_version"])
        rows = pa.RecordBatchReader.from_stream(scan).read_all().to_pylist()
        keys = [json.dumps({name: row[name] for name in names}, ensure_ascii=False) for row in rows]
        assert len(set(keys)) == len(keys)
        return dict(zip(keys, (row["_millrace_version"] for row in rows), strict=True))

    def lose(self, schema: TableSchema, key: str) -> None:
        self._table(schema).delete(" AND ".join(f"{name} = {value}" for name, value in json.loads(key).items()))

    def drop(self, schema: TableSchema) -> None:
        shutil.rmtree(self._table(schema).table_uri.removeprefix("file://"))

    def _table(self, schema: TableSchema) -> DeltaTable:
        uri = f"{self._settings.path}/{schema.table.schema}.{schema.table.name}"
        return DeltaTable(uri, storage_options=self._options)


class S3DeltaBench(DeltaBench):
    """Delta tables in S3, whose old rows are marked by deletion vectors."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        mark_everywhere(patch, small_files=4)
        patch.setattr(sink, "_THOROUGH_SECONDS", 0.0)
        server: S3Server = request.getfixturevalue("s3_server")
        path = request.getfixturevalue("s3_url")
        super().__init__(request.getfixturevalue("tmp_path"), path, server.storage_options)

    def drop(self, schema: TableSchema) -> None:
        uri = f"{self._settings.path}/{schema.table.schema}.{schema.table.name}"
        remove_prefix(uri, self._options or {})


class StagedDeltaBench(DeltaBench):
    """A folder of Delta tables whose batches are written by several tasks."""

    def open(self) -> Sink:
        return StagedSink(self._open, random.Random(7))


class RedisBench:
    """The session's Redis with a prefix of the test's own."""

    def __init__(self, request: pytest.FixtureRequest, **settings: Any) -> None:
        self._server = request.getfixturevalue("redis_server")
        self._settings = RedisSettings(url=self._server.url, prefix=f"{uuid.uuid4().hex[:8]}:", **settings)
        self._client = redis.Redis.from_url(self._server.url)

    def open(self) -> Sink:
        return open_redis(self._settings, SinkContext(Path("unused")))

    def restart(self) -> None:
        self._server.restart()

    def versions(self, schema: TableSchema) -> dict[str, int]:
        head = f"{self._settings.prefix}~v:"
        marks = list(self._client.scan_iter(match=f"{head}*", count=1000))
        values: list[Any] = self._client.mget(marks) if marks else []
        return {key.decode(): int(value[:16], 16) for key, value in zip(marks, values, strict=True)}

    def lose(self, schema: TableSchema, key: str) -> None:
        self._client.delete(Names.of(schema, self._settings.prefix, self._settings.key).row(key))

    def drop(self, schema: TableSchema) -> None:
        for key in self._client.scan_iter(match=f"{self._settings.prefix}*", count=1000):
            self._client.delete(key)


class OpenSearchBench:
    """The session's OpenSearch with a prefix of the test's own."""

    def __init__(self, request: pytest.FixtureRequest, **settings: Any) -> None:
        self._server = request.getfixturevalue("opensearch_server")
        self._settings = OpenSearchSettings(
            url=self._server.url, prefix=request.getfixturevalue("index_prefix"), replicas=0, **settings
        )

    def open(self) -> Sink:
        return open_opensearch(self._settings, SinkContext(Path("unused")))

    def restart(self) -> None:
        """Closing an index ends its engine as a restart does, and forgets deletes; a restart takes half a minute."""
        for verb in ("_close", "_open"):
            self._ask("POST", f"/{self._settings.prefix}*/{verb}?wait_for_active_shards=1")

    def versions(self, schema: TableSchema) -> dict[str, int]:
        """A key whose routing changed is there several times: live once, and with older tombstones."""
        self._ask("POST", f"{self._index(schema)}/_refresh")
        body = {"size": 1000, "version": True, "sort": [{"millrace.version": "asc"}], "_source": False}
        found = self._ask("POST", f"{self._index(schema)}/_search", body)["hits"]["hits"]
        return {hit["_id"]: hit["_version"] for hit in found}

    def lose(self, schema: TableSchema, key: str) -> None:
        self._ask("POST", f"{self._index(schema)}/_refresh")
        query = {"query": {"ids": {"values": [document_id(key)]}}}
        self._ask("POST", f"{self._index(schema)}/_delete_by_query", query)

    def drop(self, schema: TableSchema) -> None:
        self._ask("DELETE", self._index(schema))

    def _index(self, schema: TableSchema) -> str:
        return f"/{index_name(self._settings.prefix, schema.table)}-000001"

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        return opensearch_request(self._server, method, path, body)


class SharedOpenSearchBench(OpenSearchBench):
    """An index that the tables of the suite share."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        together = {TableId("public", name): TableShape(target="together") for name in TABLES}
        super().__init__(request, shape=together)

    def versions(self, schema: TableSchema) -> dict[str, int]:
        head = id_prefix(schema.table)
        return {key: version for key, version in super().versions(schema).items() if key.startswith((head, "sha256"))}

    def lose(self, schema: TableSchema, key: str) -> None:
        self._ask("POST", f"{self._index(schema)}/_refresh")
        query = {"query": {"ids": {"values": [document_id(key, id_prefix(schema.table))]}}}
        self._ask("POST", f"{self._index(schema)}/_delete_by_query", query)

    def _index(self, schema: TableSchema) -> str:
        return f"/{self._settings.prefix}together-000001"


LOOKUPS = {f"public.{name}": ("label", "good", "big") for name in TABLES}
ROUTING = {f"public.{name}": "label" for name in TABLES}
BY_KEY = {f"public.{name}": "id" for name in TABLES}


def marking_delta(request: pytest.FixtureRequest) -> Bench:
    """Delta tables whose old rows are marked by deletion vectors, as those of large tables are."""
    mark_everywhere(request.getfixturevalue("monkeypatch"), small_files=4)
    return DeltaBench(request.getfixturevalue("tmp_path"))


MakeBench = Callable[[pytest.FixtureRequest], Bench]


BENCHES: dict[str, MakeBench] = {
    "delta": lambda request: DeltaBench(request.getfixturevalue("tmp_path")),
    "delta-marks": marking_delta,
    "delta-s3": S3DeltaBench,
    "delta-staged": lambda request: StagedDeltaBench(request.getfixturevalue("tmp_path")),
    "memory": lambda _request: MemoryBench(),
    "opensearch": OpenSearchBench,
    "opensearch-shared": SharedOpenSearchBench,
    "opensearch-routed": lambda request: OpenSearchBench(request, shards=3, routing=ROUTING),
    "opensearch-routed-by-key": lambda request: OpenSearchBench(request, shards=3, routing=BY_KEY),
    "redis": RedisBench,
    "redis-hash": lambda request: RedisBench(request, form="hash"),
    "redis-lookups": lambda request: RedisBench(request, lookups=LOOKUPS),
    "redis-tagged": lambda request: RedisBench(request, form="hash", lookups=LOOKUPS, key="{{table}}:{key}"),
}

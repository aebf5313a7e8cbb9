"""OpenSearch: a row is a document whose external version is the change's, written by bulk requests of raw bytes.

A document is the row as the log has it, plus one field `millrace` with its version. A deleted row stays as a
tombstone document that the alias hides: OpenSearch itself forgets deletes after a minute and at every restart, and an
older write would bring the row back. Search through the alias, never the index behind it.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import orjson
import pyarrow as pa
from pydantic import Field, field_validator

from cdc.config import SecretField, SinkSettings
from cdc.errors import Busy, Rejected, RejectedItem, SinkError
from cdc.model import TableId, TableSchema
from cdc.ports import Batch, Sink
from cdc.secret import Secret
from sinks import images as rows_as
from sinks.context import SinkContext
from sinks.images import STORED_ROW_MISSING, arranged, columns, key_of, not_before, ordered, partial_first
from sinks.opensearch_bulk import Bulk, IndexGone, Item, item
from sinks.opensearch_client import Client, RequestRefused, path_of
from sinks.opensearch_index import Index, Indexes
from sinks.opensearch_mapping import document_id, index_name, raw_document_id
from sinks.raw_json import build, elements, members, splice, unquote

_PAGE = 2000
_READ = 500
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class OpenSearchSettings(SinkSettings):
    """An OpenSearch cluster."""

    kind: Literal["opensearch"] = "opensearch"
    url: str = "http://127.0.0.1:9200"
    """http:// or https://; without a password in it."""
    username: str = ""
    password: SecretField = Secret("")
    ca_file: str = ""
    """Certificate authority for https, if not the system's."""
    prefix: str = Field("", pattern=r"^([a-z0-9][a-z0-9._-]{0,80})?$")
    """Put before every alias and index."""
    shards: int = Field(1, ge=1)
    replicas: int = Field(1, ge=0)
    refresh: Literal["", "wait_for", "true"] = ""
    """Empty: rows can be searched within the index's refresh interval (a second)."""
    bulk_mb: float = Field(5.0, gt=0, le=90)
    """Size of a bulk request; OpenSearch refuses more than 100 MB."""
    tombstone_days: float = Field(7.0, gt=0)
    """How long a deleted row is remembered: longer than any replay reaches back."""
    metadata: str = Field("millrace", pattern=r"^[a-z][a-z0-9_]{0,40}$")
    """Field of a document that holds its version."""
    fields: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """Mapping of single columns: `public.users: {bio: {type: text, analyzer: english}}`."""

    @field_validator("url")
    @classmethod
    def _no_password(cls, url: str) -> str:
        if "@" in url:
            raise ValueError("the url holds credentials; use username and password instead")
        if not url.startswith(("http://", "https://")):
            raise ValueError("the url begins with neither http:// nor https://")
        return url


SETTINGS = OpenSearchSettings


def open_sink(settings: OpenSearchSettings, context: SinkContext) -> Sink:
    """Connect and ask for the cluster's name, so that wrong credentials show at the start."""
    client = Client(settings.name, settings.url, settings.username, settings.password, settings.ca_file)
    client.json("GET", "/")
    return OpenSearchSink(settings, client, context)


class OpenSearchSink:
    """See cdc.ports.Sink."""

    def __init__(self, settings: OpenSearchSettings, client: Client, context: SinkContext) -> None:
        self._settings = settings
        self._client = client
        shape = {"number_of_shards": settings.shards, "number_of_replicas": settings.replicas}
        self._indexes = Indexes(
            client, settings.name, settings.prefix, settings.metadata, shape, settings.fields, context.wait
        )
        self._bulk = Bulk(client, int(settings.bulk_mb * (1 << 20)), settings.refresh, context.wait)
        self._open: dict[TableId, Index] = {}
        self._purged: dict[TableId, datetime] = {}
        # what is put behind a row's last member, and what stands for a deleted row
        self._mark = f'"{settings.metadata}":{{"version":%d}}}}'.encode()
        self._tombstone = f'{{"{settings.metadata}":{{"version":%d,"deleted":true,"at":%b}}}}'.encode()

    @property
    def name(self) -> str:
        return self._settings.name

    def prepare(self, schema: TableSchema) -> None:
        self._open[schema.table] = self._indexes.open(schema)

    def apply(self, batch: Batch) -> None:
        try:
            refused = self._apply(batch)
        except (IndexGone, RequestRefused) as error:
            if isinstance(error, RequestRefused) and error.status != 404:
                raise
            self.prepare(batch.schema)
            raise Busy(
                f"sink {self.name!r}: the index of {batch.schema.table} had vanished and was made again, empty.",
                "Fill it with: millrace backfill",
                retry_after=0.1,
            ) from None
        self._purge_daily(batch.schema)
        if refused:
            raise Rejected(refused)

    def _apply(self, batch: Batch) -> list[RejectedItem]:
        index = self._truncate(self._open[batch.schema.table], batch)
        partial, whole = partial_first(not_before(batch.rows, index.truncated))
        table = str(batch.schema.table)
        refused: list[RejectedItem] = []
        items = [*self._items(whole), *self._filled(index, partial, table, refused)]
        for refusal in self._bulk.send(index.alias, items):
            refused.append(RejectedItem(table, refusal.item.key, refusal.item.version, refusal.reason))
        return refused

    def _items(self, rows: pa.Table) -> Iterator[Item]:
        afters = rows.column("after").cast(pa.binary()).to_pylist()
        for key, op, version, after in zip(*columns(rows, "key", "op", "version"), afters, strict=True):
            source = self._gone(version) if op == "d" else self._marked(after or b"{}", version)
            yield item(key, version, raw_document_id(key), source)

    def _gone(self, version: int) -> bytes:
        """A tombstone; `at` is when it was written, since a replay may write deletes of long ago."""
        return self._tombstone % (version, orjson.dumps(datetime.now(UTC)))

    def _marked(self, image: bytes, version: int) -> bytes:
        separator = b"" if image == b"{}" else b","
        return image[:-1] + separator + self._mark % version

    def _filled(self, index: Index, rows: pa.Table, table: str, refused: list[RejectedItem]) -> Iterator[Item]:
        """Partial rows with the stored columns put in. There is one writer, so nothing happens in between; and if it
        did, a newer version would win."""
        for start in range(0, rows.num_rows, _READ):
            part = rows.slice(start, _READ)
            keys, versions, afters, unchanged = columns(part, "key", "version", "after", "unchanged")
            held = self._held(index, keys)
            for key, version, after, missing in zip(keys, versions, afters, unchanged, strict=True):
                stored, source = held.get(document_id(key), (0, None))
                if stored >= version:
                    continue
                whole, lacking = splice(after, source, missing) if source else ("", missing)
                if lacking:
                    refused.append(RejectedItem(table, key, version, STORED_ROW_MISSING))
                else:
                    yield item(key, version, raw_document_id(key), self._marked(whole.encode(), version))

    def _held(self, index: Index, keys: list[str]) -> dict[str, tuple[int, str | None]]:
        """Stored version and row by document; the row is None for a tombstone."""
        body = {"ids": [document_id(key) for key in keys]}
        answer = members(self._client.text("POST", path_of(index.name, "_mget"), body))
        found: dict[str, tuple[int, str | None]] = {}
        for document in map(members, elements(answer["docs"])):
            if document.get("found") == "true":
                found[unquote(document["_id"])] = (int(document["_version"]), self._row(document["_source"]))
        return found

    def _row(self, source: str) -> str | None:
        """The row inside a document; None for a tombstone."""
        values = members(source)
        mark = members(values.pop(self._settings.metadata, "{}"))
        return None if mark.get("deleted") == "true" else build(values)

    def _truncate(self, index: Index, batch: Batch) -> Index:
        """Turn every older row into a tombstone of the truncate's version, page by page."""
        if batch.truncated <= index.truncated:
            return index
        older = {"range": {f"{self._settings.metadata}.version": {"lt": batch.truncated}}}
        query = {"bool": {"filter": [older], "must_not": [self._indexes.hidden()]}}
        body = {"size": _PAGE, "_source": False, "query": query}
        while True:
            self._client.text("POST", path_of(index.name, "_refresh"))
            hits = self._client.json("POST", path_of(index.name, "_search"), body)["hits"]["hits"]
            if not hits:
                break
            source = self._gone(batch.truncated)
            ids = [orjson.dumps(hit["_id"]) for hit in hits]
            if self._bulk.send(index.alias, [item("", batch.truncated, identity, source) for identity in ids]):
                raise SinkError(f"sink {self.name!r}: OpenSearch refuses to empty {index.alias}.", "Look at its log.")
        self._open[batch.schema.table] = self._indexes.remember_truncate(index, batch.truncated)
        return self._open[batch.schema.table]

    def _purge_daily(self, schema: TableSchema) -> None:
        now = datetime.now(UTC)
        if now - self._purged.get(schema.table, _LONG_AGO) > timedelta(days=1):
            self._purged[schema.table] = now
            self.purge(schema, now - timedelta(days=self._settings.tombstone_days))

    def purge(self, schema: TableSchema, before: datetime) -> int:
        """Forget rows whose deletes were written before a time; nothing older may be replayed afterwards."""
        name = self._indexes.behind(index_name(self._settings.prefix, schema.table))
        if name is None:
            return 0
        old = {"range": {f"{self._settings.metadata}.at": {"lt": before.isoformat()}}}
        query = {"query": {"bool": {"filter": [self._indexes.hidden(), old]}}}
        options = {"refresh": "true", "conflicts": "proceed"}
        return int(self._client.json("POST", path_of(name, "_delete_by_query"), query, **options)["deleted"])

    def stored(self, schema: TableSchema) -> pa.Table:
        name = self._indexes.behind(index_name(self._settings.prefix, schema.table))
        sources = self._sources(name) if name else iter(())
        found = [row for source in sources if (row := self._row(source)) is not None]
        return ordered((key_of(schema, row), arranged(schema, row)) for row in found)

    def _sources(self, name: str) -> Iterator[str]:
        self._client.text("POST", path_of(name, "_refresh"))
        body = {"size": _PAGE, "sort": ["_doc"], "query": {"bool": {"must_not": [self._indexes.hidden()]}}}
        answer = self._client.text("POST", path_of(name, "_search"), body, scroll="2m")
        while hits := list(elements(members(members(answer)["hits"])["hits"])):
            yield from (members(hit)["_source"] for hit in hits)
            scroll = {"scroll": "2m", "scroll_id": unquote(members(answer)["_scroll_id"])}
            answer = self._client.text("POST", "/_search/scroll", scroll)

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        return rows_as.expected(schema, images)

    def facts(self) -> Mapping[str, str]:
        """What an operator should know."""
        try:
            return {"health": str(self._client.json("GET", "/_cluster/health")["status"])}
        except SinkError:
            return {"health": "unknown"}

    def close(self) -> None:
        self._client.close()

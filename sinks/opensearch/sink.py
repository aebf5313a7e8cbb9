"""The OpenSearch sink: a row is a document whose external version is that of the change, written by bulk requests.

A document is the JSON of the row in the log plus one field `millrace` with its version. A deleted row stays as a
tombstone document that the alias filters out: OpenSearch forgets deletes after a minute and at every restart, and then
an older write would bring the row back. Search through the alias, never in the index behind it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain

import orjson
import pyarrow as pa

from cdc.errors import Lost, Rejected, RejectedItem, SinkError
from cdc.json_text.members import elements, members, splice, unquote
from cdc.key_range import Removal
from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Batch, Sink
from sinks.context import SinkContext
from sinks.fingerprints import Difference, Mark
from sinks.opensearch import key_ranges
from sinks.opensearch.bulk import Bulk, IndexGone, Item, item
from sinks.opensearch.client import Client, RequestRefused, path_of
from sinks.opensearch.documents import Documents
from sinks.opensearch.fingerprint import compared, fingerprints
from sinks.opensearch.index import Index, Indexes
from sinks.opensearch.items import TableItems
from sinks.opensearch.mapping import document_id, document_ids, id_prefix
from sinks.opensearch.multi_shard import MultiShardWriter
from sinks.opensearch.routing import Route, route_of
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.stored_rows import DocumentRows
from sinks.rows.images import STORED_ROW_MISSING, columns, not_before, partial_first
from sinks.rows.read_sizes import Pieces
from sinks.rows.stored_images import all_arranged, images_table, in_key_order
from sinks.rows.stored_key import StoredKey

_PAGE = 2000
_PURGED_PER_SECOND = "5000"
"""Tombstones that a purge deletes while batches go on: a million in some minutes, once a day."""
_log = logging.getLogger(__name__)
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def open_sink(settings: OpenSearchSettings, context: SinkContext) -> Sink:
    """Connect and send one request, so that wrong credentials fail at the start."""
    client = Client(settings.name, settings.url, settings.username, settings.password, settings.ca_file)
    client.json("GET", "/")
    return OpenSearchSink(settings, client, context)


class OpenSearchSink:
    """See cdc.ports.Sink."""

    def __init__(self, settings: OpenSearchSettings, client: Client, context: SinkContext) -> None:
        self._settings = settings
        self._client = client
        self._indexes = Indexes(client, settings, context.wait)
        self._bulk = Bulk(client, int(settings.bulk_mb * (1 << 20)), settings.refresh, context.wait)
        self._open: dict[TableId, Index] = {}
        self._routes: dict[TableId, Route] = {}
        self._pieces: dict[TableId, Pieces] = {}
        self._purged: dict[str, datetime] = {}

    @property
    def name(self) -> str:
        return self._settings.name

    def prepare(self, schema: TableSchema) -> None:
        index = self._indexes.open(schema)
        self._routes[schema.table] = route_of(self._client, self.name, schema, index.routing, index.name)
        self._open[schema.table] = index
        self._pieces.setdefault(schema.table, Pieces())

    def apply(self, batch: Batch) -> None:
        try:
            refused = self._apply(batch)
        except (IndexGone, RequestRefused) as error:
            if isinstance(error, RequestRefused) and error.status != 404:
                raise
            raise Lost(
                f"sink {self.name!r}: the index of {batch.schema.table} is gone.", "Millrace reconnects and checks it."
            ) from None
        if refused:
            raise Rejected(refused)

    def _apply(self, batch: Batch) -> list[RejectedItem]:
        index, route = self._truncate(self._open[batch.schema.table], batch), self._routes[batch.schema.table]
        for removal in batch.removed:
            self._remove(batch.schema.table, index, removal)
        rows, table = not_before(batch.rows, index.truncated), str(batch.schema.table)
        pieces = self._pieces[batch.schema.table]
        if route.multi_shard:
            documents = self._documents(batch.schema.table)
            return MultiShardWriter(self._client, self._bulk, documents, index, route, pieces).write(rows, table)
        partial, whole = partial_first(rows)
        refused: list[RejectedItem] = []
        own = TableItems(self._documents(batch.schema.table), route, self._id_prefix(batch.schema.table))
        filled = self._fill(index, own, partial, pieces, refused)
        for items in chain([list(own.items(whole))], filled):
            for refusal in self._bulk.send(index.alias, items):
                refused.append(RejectedItem(table, refusal.item.key, refusal.item.version, refusal.reason))
        return refused

    def _fill(
        self, index: Index, own: TableItems, rows: pa.Table, pieces: Pieces, refused: list[RejectedItem]
    ) -> Iterator[list[Item]]:
        """Partial rows with their stored columns, in pieces. The trap: send a piece before taking the next.

        Nothing is written between the read and the write, since there is one writer; otherwise the newer version wins.
        """
        partial = list(zip(*columns(rows, "table", "key", "version", "after", "unchanged"), strict=True))
        for piece in pieces.of(partial):
            items: list[Item] = []
            stored = self._stored(index, own, [key for _, key, *_ in piece], pieces)
            for table, key, version, after, unchanged in piece:
                stored_version, row = stored.get(own.id(key), (0, None))
                if stored_version >= version:
                    continue
                whole, missing = splice(after, row, unchanged) if row else ("", unchanged)
                if missing:
                    refused.append(RejectedItem(table, key, version, STORED_ROW_MISSING))
                    continue
                items.append(own.live(key, version, whole))
            yield items

    def _stored(
        self, index: Index, own: TableItems, keys: list[str], pieces: Pieces
    ) -> dict[str, tuple[int, str | None]]:
        """Stored version and row by document id; the row is None for a tombstone."""
        documents = [{"_id": own.id(key), "routing": own.route.of(key, "") or own.id(key)} for key in keys]
        text = self._client.text("POST", path_of(index.name, "_mget"), {"docs": documents})
        pieces.record(len(keys), len(text))
        answer = members(text)
        found: dict[str, tuple[int, str | None]] = {}
        for document in map(members, elements(answer["docs"])):
            if document.get("found") == "true":
                row = own.documents.row(document["_source"])
                found[unquote(document["_id"])] = (int(document["_version"]), row)
        return found

    def _truncate(self, index: Index, batch: Batch) -> Index:
        """Turn every older row into a tombstone with the truncate's version, page by page."""
        if batch.truncated <= index.truncated:
            return index
        below = {"range": {f"{self._settings.metadata}.version": {"lt": batch.truncated}}}
        mine = self._indexes.of_table(batch.schema.table)
        query = {"bool": {"filter": [below, mine], "must_not": [self._indexes.tombstones()]}}
        body = {"size": _PAGE, "_source": False, "query": query}
        while True:
            self._client.text("POST", path_of(index.name, "_refresh"))
            hits = self._client.json("POST", path_of(index.name, "_search"), body)["hits"]["hits"]
            if not hits:
                break
            source = self._documents(batch.schema.table).tombstone(batch.truncated)
            older = [(orjson.dumps(hit["_id"]), hit.get("_routing")) for hit in hits]
            items = [item("", batch.truncated, identity, source, routing) for identity, routing in older]
            if self._bulk.send(index.alias, items):
                raise SinkError(
                    f"sink {self.name!r}: OpenSearch refuses to empty {index.alias}.", "See the OpenSearch log."
                )
        self._open[batch.schema.table] = self._indexes.record_truncate(index, batch.truncated)
        return self._open[batch.schema.table]

    def _remove(self, table: TableId, index: Index, removal: Removal) -> None:
        """Turn the older rows of a range into tombstones with its version. Every copy of a routed row is a hit."""
        below = {"range": {f"{self._settings.metadata}.version": {"lt": removal.version}}}
        conditions = key_ranges.filters(self._client, index.name, removal.range)
        mine = self._indexes.of_table(table)
        query = {"bool": {"filter": [below, mine, *conditions], "must_not": [self._indexes.tombstones()]}}
        tombstone = self._documents(table).tombstone(removal.version)
        search = {"query": query, "_source": key_ranges.source_of(removal.range)}
        for hits in self._pages(index.name, search):
            found = [members(hit) for hit in hits]
            texts = key_ranges.texts([hit["_source"] for hit in found], removal.range.columns)
            removed = [found[number] for number in removal.range.contains(texts).nonzero()[0]]
            items = [item("", removal.version, hit["_id"].encode(), tombstone, _routing(hit)) for hit in removed]
            if self._bulk.send(index.alias, items):
                raise SinkError(
                    f"sink {self.name!r}: OpenSearch refuses a delete in {index.alias}.", "See the OpenSearch log."
                )

    def after_batch(self) -> None:
        """See sinks.apply.store_connection.Tended: start the daily purge of each table."""
        now = datetime.now(UTC)
        for table, index in self._open.items():
            if now - self._purged.get(index.alias, _LONG_AGO) > timedelta(days=1):
                self._purged[index.alias] = now
                try:
                    self._purge(index.name, now - timedelta(days=self._settings.tombstone_days))
                except SinkError as error:
                    _log.warning(
                        "sink %s: old tombstones of %s could not be deleted; next try in a day: %s",
                        self.name,
                        table,
                        error,
                    )

    def purge(self, schema: TableSchema, before: datetime) -> None:
        """Start the deletion of tombstones written before a time; nothing older may be replayed afterwards. The server
        works in the background, a thousand at a time: batches do not wait."""
        name = self._indexes.index_of(self._indexes.alias(schema.table))
        if name is not None:
            self._purge(name, before)

    def _purge(self, name: str, before: datetime) -> None:
        old = {"range": {f"{self._settings.metadata}.at": {"lt": before.isoformat()}}}
        query = {"query": {"bool": {"filter": [self._indexes.tombstones(), old]}}}
        options = {"refresh": "true", "conflicts": "proceed", "wait_for_completion": "false"}
        speed = {"scroll_size": "1000", "requests_per_second": _PURGED_PER_SECOND}
        self._client.json("POST", path_of(name, "_delete_by_query"), query, **options, **speed)

    def stored(self, schema: TableSchema) -> pa.Table:
        return in_key_order(self.stored_pieces(schema))

    def stored_pieces(self, schema: TableSchema, keys: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """See cdc.ports.StoredPieces. `keys` are document ids."""
        name = self._indexes.index_of(self._indexes.alias(schema.table))
        if name is None:
            return
        self._client.text("POST", path_of(name, "_refresh"))
        documents, live = self._documents(schema.table), self._indexes.live_rows(schema.table)
        rows = DocumentRows(self._client, schema, name, documents, live)
        yield from rows.all() if keys is None else rows.of(keys)

    def stored_key(self, schema: TableSchema, key: str) -> StoredKey:
        """See sinks.rows.stored_key.KeyReader. A search by id finds the document on any shard."""
        name = self._indexes.index_of(self._indexes.alias(schema.table))
        identity = document_id(key, self._id_prefix(schema.table))
        if name is None:
            return StoredKey("absent", 0, self._indexes.alias(schema.table))
        self._client.text("POST", path_of(name, "_refresh"))
        deleted = [f"{self._settings.metadata}.deleted"]
        body = {"size": 1, "version": True, "_source": deleted, "query": {"ids": {"values": [identity]}}}
        hits = self._client.json("POST", path_of(name, "_search"), body)["hits"]["hits"]
        if not hits:
            return StoredKey("absent", 0, f"{name}/{identity}")
        gone = hits[0].get("_source", {}).get(self._settings.metadata, {}).get("deleted")
        return StoredKey("deleted" if gone else "there", int(hits[0]["_version"]), f"{name}/{identity}")

    def _pages(self, name: str, search: Mapping[str, object]) -> Iterator[list[str]]:
        """The hits of a search, after a refresh, page by page."""
        self._client.text("POST", path_of(name, "_refresh"))
        body = {"size": _PAGE, "sort": ["_doc"], **search}
        answer = self._client.text("POST", path_of(name, "_search"), body, scroll="2m")
        while hits := list(elements(members(members(answer)["hits"])["hits"])):
            yield hits
            scroll = {"scroll": "2m", "scroll_id": unquote(members(answer)["_scroll_id"])}
            answer = self._client.text("POST", "/_search/scroll", scroll)

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        keys, rows = (images[name].combine_chunks() for name in ("key", "after"))
        ids = document_ids(keys, self._id_prefix(schema.table))
        return in_key_order([images_table(ids, all_arranged(schema, rows))])

    def _documents(self, table: TableId) -> Documents:
        return Documents(self._settings.metadata, str(table) if self._settings.sharing(table) else "")

    def _id_prefix(self, table: TableId) -> str:
        return id_prefix(table) if self._settings.sharing(table) else ""

    def mark_table(self, schema: TableSchema) -> Mark:
        """See sinks.fingerprints.Fingerprinted."""
        index = self._indexes.with_id(self._open[schema.table])
        self._open[schema.table] = index
        found = fingerprints(self._client, [index.alias])[index.alias]
        if [one.id for one in found] != [index.id]:
            raise Lost(f"sink {self.name!r}: the index {index.name} is gone.", "Millrace reconnects and checks it.")
        return found[0].mark()

    def compare_marks(self, known: Mapping[TableId, Mark], reached: Lsn) -> Mapping[TableId, Mark | Difference]:
        """See sinks.fingerprints.Fingerprinted."""
        aliases = {table: self._indexes.alias(table) for table in known}
        found = fingerprints(self._client, sorted(set(aliases.values())))
        return {table: compared(found[aliases[table]], mark) for table, mark in known.items()}

    def recreate(self, schema: TableSchema) -> None:
        """See sinks.fingerprints.Fingerprinted. The earlier index stays, without the alias."""
        self._indexes.recreate(schema)

    def facts(self) -> Mapping[str, str]:
        """The health of the cluster, for the operator."""
        try:
            return {"health": str(self._client.json("GET", "/_cluster/health")["status"])}
        except SinkError:
            return {"health": "unknown"}

    def close(self) -> None:
        self._client.close()


def _routing(hit: Mapping[str, str]) -> str | None:
    return unquote(hit["_routing"]) if "_routing" in hit else None

"""The bulk items of one table: its documents with their ids and routing."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from sinks.opensearch.bulk import Item, item
from sinks.opensearch.documents import Documents
from sinks.opensearch.mapping import document_id, raw_document_id
from sinks.opensearch.routing import Route
from sinks.rows.images import columns


@dataclass(frozen=True, slots=True)
class TableItems:
    """`prefix` begins the ids of a table that shares its index."""

    documents: Documents
    route: Route
    prefix: str = ""

    def id(self, key: str) -> str:
        """The id of a row's document."""
        return document_id(key, self.prefix)

    def live(self, key: str, version: int, image: str) -> Item:
        """The document of a complete row."""
        source = self.documents.live(image.encode(), version)
        return item(key, version, raw_document_id(key, self.prefix), source, self.route.of(key, image))

    def items(self, rows: pa.Table) -> Iterator[Item]:
        """Documents and tombstones of complete changes."""
        afters = rows.column("after").cast(pa.binary()).to_pylist()
        for key, op, version, after in zip(*columns(rows, "key", "op", "version"), afters, strict=True):
            image = b"" if op == "d" else after or b"{}"
            source = self.documents.live(image, version) if image else self.documents.tombstone(version)
            routing = self.route.of(key, image.decode()) if self.route.column else None
            yield item(key, version, raw_document_id(key, self.prefix), source, routing)

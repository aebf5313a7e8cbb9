"""Writes a table whose keys may have copies on several shards (see sinks.opensearch.routing): read, write, read again,
hide older copies."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

import pyarrow as pa

from cdc.errors import RejectedItem
from cdc.json_text.members import quote, splice
from sinks.opensearch.bulk import Bulk, Item, item
from sinks.opensearch.client import Client
from sinks.opensearch.documents import Documents
from sinks.opensearch.index import Index
from sinks.opensearch.mapping import document_id, raw_document_id
from sinks.opensearch.routing import Copy, Route, copies
from sinks.rows.images import STORED_ROW_MISSING, columns
from sinks.rows.read_sizes import Pieces

_CHANGES_PER_READ = 500


@dataclass(frozen=True, slots=True)
class Change:
    """A folded change."""

    key: str
    op: str
    version: int
    after: str | None
    unchanged: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class MultiShardWriter:
    """Writes one table. Every shard is asked for copies before and after the write."""

    client: Client
    bulk: Bulk
    documents: Documents
    index: Index
    route: Route
    pieces: Pieces

    def write(self, rows: pa.Table, table: str) -> list[RejectedItem]:
        """Leave at most one live document for each key, the newest; returns the rows that are refused permanently."""
        refused: list[RejectedItem] = []
        for start in range(0, rows.num_rows, _CHANGES_PER_READ):
            part = rows.slice(start, _CHANGES_PER_READ)
            changes = list(starmap(Change, zip(*columns(part, *Change.__slots__), strict=True)))
            refused += self._write(changes, table)
        return refused

    def _write(self, changes: Sequence[Change], table: str) -> list[RejectedItem]:
        refused: list[RejectedItem] = []
        self._send([change for change in changes if not change.unchanged], table, refused)
        for piece in self.pieces.of([change for change in changes if change.unchanged]):
            self._send(piece, table, refused)
        failed = {one.key for one in refused}
        self._hide_older([document_id(change.key) for change in changes if change.key not in failed])
        return refused

    def _send(self, changes: Sequence[Change], table: str, refused: list[RejectedItem]) -> None:
        """Send changes that are all partial or all whole. For whole ones only the metadata of the copies is read."""
        ids = {change.key: document_id(change.key) for change in changes}
        whole = not any(change.unchanged for change in changes)
        stored = self._copies(ids.values(), self.documents.metadata if whole else "")
        if not whole:
            read = (len(copy.source) for found in stored.values() for copy in found)
            self.pieces.record(len(changes), sum(read))
        items: list[Item] = []
        for change in changes:
            items += self._items(change, stored.get(ids[change.key], ()), table, refused)
        for refusal in self.bulk.send(self.index.alias, items):
            refused.append(RejectedItem(table, refusal.item.key, refusal.item.version, refusal.reason))

    def _copies(self, ids: Iterable[str], only: str = "") -> Mapping[str, Sequence[Copy]]:
        return copies(self.client, self.index.name, self.route, ids, only)

    def _items(self, change: Change, stored: Sequence[Copy], table: str, refused: list[RejectedItem]) -> Iterator[Item]:
        if any(copy.version > change.version for copy in stored):
            return
        identity = raw_document_id(change.key)
        if change.op == "d":
            for routing in {copy.routing for copy in stored} or {None}:
                yield item(change.key, change.version, identity, self.documents.tombstone(change.version), routing)
            return
        image = self._whole(change, stored)
        if image is None:
            refused.append(RejectedItem(table, change.key, change.version, STORED_ROW_MISSING))
        elif image:
            source = self.documents.live(image.encode(), change.version)
            yield item(change.key, change.version, identity, source, self.route.of(change.key, image))

    def _whole(self, change: Change, stored: Sequence[Copy]) -> str | None:
        """The row with its unchanged columns; empty if it is stored already, None if those columns are not stored."""
        after = change.after or "{}"
        if not change.unchanged:
            return after
        newest = max((copy.version for copy in stored), default=0)
        if newest == change.version:
            return ""
        rows = [self.documents.row(copy.source) for copy in stored if copy.version == newest]
        row = next((row for row in rows if row is not None), None)
        whole, missing = splice(after, row, change.unchanged) if row else ("", change.unchanged)
        return None if missing else whole

    def _hide_older(self, ids: Sequence[str]) -> None:
        """Turn every copy that is older than the newest one into a tombstone."""
        items = []
        for one, found in self._copies(ids, self.documents.metadata).items():
            newest = max(copy.version for copy in found)
            for copy in found:
                if copy.version < newest and self.documents.row(copy.source) is not None:
                    source = self.documents.tombstone(newest)
                    items.append(item("", newest, quote(one).encode(), source, copy.routing))
        self.bulk.send(self.index.alias, items)

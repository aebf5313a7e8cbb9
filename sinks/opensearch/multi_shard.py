"""Tables whose copies can lie on several shards (see sinks.opensearch.routing): look, write, look again, clear away."""

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

_READ = 500


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
    """Writes one table."""

    client: Client
    bulk: Bulk
    documents: Documents
    index: Index
    route: Route
    pieces: Pieces

    def write(self, rows: pa.Table, table: str) -> list[RejectedItem]:
        """Every key ends with one live document at most, the newest; returns what is refused for ever."""
        refused: list[RejectedItem] = []
        for start in range(0, rows.num_rows, _READ):
            part = rows.slice(start, _READ)
            changes = list(starmap(Change, zip(*columns(part, *Change.__slots__), strict=True)))
            refused += self._write(changes, table)
        return refused

    def _write(self, changes: Sequence[Change], table: str) -> list[RejectedItem]:
        refused: list[RejectedItem] = []
        self._send([change for change in changes if not change.unchanged], table, refused)
        for piece in self.pieces.of([change for change in changes if change.unchanged]):
            self._send(piece, table, refused)
        parked = {one.key for one in refused}
        self._clear([document_id(change.key) for change in changes if change.key not in parked])
        return refused

    def _send(self, changes: Sequence[Change], table: str, refused: list[RejectedItem]) -> None:
        """Changes that are all partial or all whole: of whole ones only the marks of stored documents are read."""
        ids = {change.key: document_id(change.key) for change in changes}
        whole = not any(change.unchanged for change in changes)
        held = self._look(ids.values(), self._marks) if whole else self._look(ids.values())
        if not whole:
            read = (len(copy.source) for found in held.values() for copy in found)
            self.pieces.weighed(len(changes), sum(read))
        items: list[Item] = []
        for change in changes:
            items += self._items(change, held.get(ids[change.key], ()), table, refused)
        for refusal in self.bulk.send(self.index.alias, items):
            refused.append(RejectedItem(table, refusal.item.key, refusal.item.version, refusal.reason))

    @property
    def _marks(self) -> str:
        return self.documents.metadata

    def _look(self, ids: Iterable[str], only: str = "") -> Mapping[str, Sequence[Copy]]:
        return copies(self.client, self.index.name, self.route, ids, only)

    def _items(self, change: Change, held: Sequence[Copy], table: str, refused: list[RejectedItem]) -> Iterator[Item]:
        if any(copy.version > change.version for copy in held):
            return
        identity = raw_document_id(change.key)
        if change.op == "d":
            for routing in {copy.routing for copy in held} or {None}:
                yield item(change.key, change.version, identity, self.documents.gone(change.version), routing)
            return
        image = self._whole(change, held)
        if image is None:
            refused.append(RejectedItem(table, change.key, change.version, STORED_ROW_MISSING))
        elif image:
            source = self.documents.live(image.encode(), change.version)
            yield item(change.key, change.version, identity, source, self.route.of(change.key, image))

    def _whole(self, change: Change, held: Sequence[Copy]) -> str | None:
        """The row with its gaps filled; empty if it is stored already, None if what it keeps is gone."""
        after = change.after or "{}"
        if not change.unchanged:
            return after
        newest = max((copy.version for copy in held), default=0)
        if newest == change.version:
            return ""
        rows = [self.documents.row(copy.source) for copy in held if copy.version == newest]
        stored = next((row for row in rows if row is not None), None)
        whole, lacking = splice(after, stored, change.unchanged) if stored else ("", change.unchanged)
        return None if lacking else whole

    def _clear(self, ids: Sequence[str]) -> None:
        """Hide every copy that is older than the newest one."""
        items = []
        for one, found in self._look(ids, self._marks).items():
            newest = max(copy.version for copy in found)
            for copy in found:
                if copy.version < newest and self.documents.row(copy.source) is not None:
                    source = self.documents.gone(newest)
                    items.append(item("", newest, quote(one).encode(), source, copy.routing))
        self.bulk.send(self.index.alias, items)

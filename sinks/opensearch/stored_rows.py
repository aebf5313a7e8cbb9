"""Reads every document of a table's index for `verify`, in pages, with a point in time per shard.

Measured with 200,000 documents of 130 bytes: pages of thousands take 3 to 5 µs of the server's CPU per document, with a
scroll or a point in time; slices take 20 (each slice tests every document), `filter_path` 11. With a point in time the
page size can change with the size of the documents. Its pages follow the order of documents in a shard, which is
undefined across shards: hence one for each shard.

Answers are split at the text that begins a hit. It contains unescaped quotes, which a JSON string cannot. If a nested
object contains that text, some piece does not end as a hit does, and a JSON parser reads the page instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.json_text.columns import slices
from cdc.json_text.members import elements, members, quote, unquote
from cdc.model import TableSchema
from sinks.opensearch.client import Client, path_of
from sinks.opensearch.documents import Documents
from sinks.opensearch.routing import shard_count
from sinks.rows.read_sizes import PageSize
from sinks.rows.stored_images import all_arranged, images_table

_MOST_ROWS = 10_000
"""OpenSearch refuses larger pages (index.max_result_window)."""
_IDS = 500
_KEEP_ALIVE = "5m"
_EVERY_SHARD = {"allow_partial_search_results": "false"}
"""Otherwise the rows of a shard that does not answer would seem lost."""
_SCORE = '","_score":'
_SOURCE = '"_source":'
_END = r'\},"sort":\[[0-9]+\]\}(?:,|\]\}\})$'
"""After the metadata field of a document, up to the next hit or the end of the answer."""


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """The rows of one table; `live` is the query that leaves tombstones out."""

    client: Client
    schema: TableSchema
    index: str
    documents: Documents
    live: dict[str, Any]

    def all(self) -> Iterator[pa.Table]:
        """Every row."""
        for shard in range(shard_count(self.client, self.index)):
            yield from self._shard(shard)

    def of(self, ids: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of these ids, on any shard."""
        for start in range(0, len(ids), _IDS):
            wanted = {"ids": {"values": list(ids[start : start + _IDS])}}
            query = {"bool": {"filter": [wanted, self.live]}}
            body = {"size": _MOST_ROWS, "sort": ["_doc"], "track_total_hits": False, "query": query}
            page = self.client.text("POST", path_of(self.index, "_search"), body, **_EVERY_SHARD)
            yield self._rows(page)[0]

    def _shard(self, shard: int) -> Iterator[pa.Table]:
        path = path_of(self.index, "_search", "point_in_time")
        pit = self.client.json("POST", path, keep_alive=_KEEP_ALIVE, preference=f"_shards:{shard}")["pit_id"]
        try:
            yield from self._pages({"id": pit, "keep_alive": _KEEP_ALIVE})
        finally:
            self.client.json("DELETE", "/_search/point_in_time", {"pit_id": [pit]})

    def _pages(self, pit: dict[str, str]) -> Iterator[pa.Table]:
        size = PageSize(_MOST_ROWS)
        body: dict[str, Any] = {"sort": ["_doc"], "track_total_hits": False, "pit": pit, "query": self.live}
        while True:
            page = self.client.text("POST", "/_search", {**body, "size": size.rows}, **_EVERY_SHARD)
            rows, last = self._rows(page)
            if last is None:
                return
            yield rows
            size.record(rows.num_rows, len(page))
            body["search_after"] = [last]

    def _rows(self, page: str) -> tuple[pa.Table, int | None]:
        """The rows of an answer and the sort value of the last one; None if it has no rows."""
        start = f'{{"_index":{quote(self.index)},"_id":"'
        pieces = page.split(start)[1:]
        if not pieces:
            return images_table(pa.array([], pa.string()), pa.array([], pa.string())), None
        last = int(pieces[-1][pieces[-1].rindex('"sort":[') + 8 : pieces[-1].rindex("]}]}")])
        found = self._split(pa.array(pieces, pa.string()))
        ids, rows = self._parsed(page) if found is None else found
        return images_table(ids, all_arranged(self.schema, rows)), last

    def _split(self, pieces: AnyArray) -> tuple[AnyArray, AnyArray] | None:
        """Ids and rows of hits; None unless every piece is a document as this sink writes it."""
        heads = pc.replace_substring_regex(pieces, self.documents.pattern + _END, "}")
        scores, sources = pc.find_substring(heads, _SCORE), pc.find_substring(heads, _SOURCE)
        whole = pc.and_(pc.less(pc.binary_length(heads), pc.binary_length(pieces)), pc.greater(sources, scores))
        if not pc.all(pc.and_(whole, pc.greater_equal(scores, pa.scalar(0)))).as_py():
            return None
        bounds = np.frombuffer(heads.buffers()[1], np.int32, len(heads) + 1).astype(np.int64)
        data = np.frombuffer(heads.buffers()[2], np.uint8)
        ids = slices(data, bounds[:-1], bounds[:-1] + np.asarray(scores), None).cast(pa.string())
        rows = slices(data, bounds[:-1] + np.asarray(sources) + len(_SOURCE), bounds[1:], None).cast(pa.string())
        return _unescaped(ids), rows

    def _parsed(self, page: str) -> tuple[AnyArray, AnyArray]:
        hits = [members(hit) for hit in elements(members(members(page)["hits"])["hits"])]
        rows = [(unquote(hit["_id"]), self.documents.row(hit["_source"])) for hit in hits]
        live = [(identity, row) for identity, row in rows if row is not None]
        return pa.array([one for one, _ in live], pa.string()), pa.array([row for _, row in live], pa.string())


def _unescaped(ids: AnyArray) -> AnyArray:
    escaped: AnyArray = pc.match_substring(ids, "\\")
    if not pc.any(escaped).as_py():
        return ids
    plain = [orjson.loads(f'"{one}"') for one in ids.filter(escaped).to_pylist()]
    return pc.replace_with_mask(ids, escaped, pa.array(plain, pa.string()))

"""Routing: the shard of a document, when a column and not the id decides.

An id is unique only within a shard, so a row whose routing value changed would exist twice: its old copy must be
hidden. That cannot happen if the column belongs to the key or the index has one shard. In all other cases every shard
is asked for copies of the key, before the write (is the change stale?) and after it (which copies are older now?). The
second read also finds what a replay that runs at the same time wrote in between.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cdc.errors import SinkError
from cdc.json_text.members import elements, members, unquote
from cdc.model import TableSchema
from sinks.opensearch.client import Client, path_of


@dataclass(frozen=True, slots=True)
class Route:
    """How the documents of one table are routed; `shard_values` has one routing value that leads to each shard."""

    column: str = ""
    in_key: bool = False
    shard_values: tuple[str, ...] = ()

    @property
    def multi_shard(self) -> bool:
        """Whether copies of a key can be on several shards."""
        return bool(self.column) and not self.in_key and len(self.shard_values) > 1

    def of(self, key: str, image: str) -> str | None:
        """The routing value of a row; None for OpenSearch's default, the id. `image` is empty for a deleted row."""
        if not self.column or not (self.in_key or image):
            return None
        raw = members(key if self.in_key else image).get(self.column, "null")
        return None if raw == "null" else unquote(raw)


@dataclass(frozen=True, slots=True)
class Copy:
    """One document of a key; `source` is JSON."""

    version: int
    routing: str | None
    source: str


def route_of(client: Client, sink: str, schema: TableSchema, column: str, index: str) -> Route:
    """The route of a table; asks the index how many shards it has."""
    if not column:
        return Route()
    if column not in {known.name for known in schema.columns}:
        raise SinkError(
            f"sink {sink!r}: routing names column {column!r}, which {schema.table} does not have.",
            f"Its columns: {', '.join(known.name for known in schema.columns)}.",
        )
    if column in {known.name for known in schema.key}:
        return Route(column, in_key=True)
    return Route(column, shard_values=_shard_values(client, index))


def shard_count(client: Client, index: str) -> int:
    """How many primary shards an index has."""
    answer = client.json("GET", path_of(index, "_settings", "index.number_of_shards"))
    return int(next(iter(answer.values()))["settings"]["index"]["number_of_shards"])


def _shard_values(client: Client, index: str) -> tuple[str, ...]:
    """Try routing values until one was found for each shard."""
    shards = shard_count(client, index)
    found: dict[int, str] = {}
    number = 0
    while len(found) < shards:
        answer = client.json("GET", path_of(index, "_search_shards"), routing=str(number))
        found.setdefault(int(answer["shards"][0][0]["shard"]), str(number))
        number += 1
    return tuple(found.values())


def copies(
    client: Client, index: str, route: Route, ids: Iterable[str], only: str = ""
) -> Mapping[str, Sequence[Copy]]:
    """Every document of these ids on every shard, including writes since the last refresh.

    `only` names the one field to read. The trap: the server then prints the document anew, which damages numbers.
    """
    documents = [{"_id": one, "routing": value} for one in ids for value in route.shard_values]
    found: dict[str, list[Copy]] = {}
    if not documents:
        return found
    options = {"_source_includes": only} if only else {}
    answer = members(client.text("POST", path_of(index, "_mget"), {"docs": documents}, **options))
    for document in map(members, elements(answer["docs"])):
        if document.get("found") == "true":
            routing = unquote(document["_routing"]) if "_routing" in document else None
            copy = Copy(int(document["_version"]), routing, document["_source"])
            found.setdefault(unquote(document["_id"]), []).append(copy)
    return found

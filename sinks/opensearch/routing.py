"""Routing: which shard a document lies on, where a column and not its id decides.

An id is unique only within a shard, so a row whose routing value changed would be there twice: its old copy must go.
Where the column belongs to the key nothing can change, and with one shard nothing can be elsewhere. In all other cases
the copies of a key are looked for on every shard, before the write (is it stale?) and after it (which copies are older
now?); the second look also finds what a replay beside us wrote in between.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cdc.errors import SinkError
from cdc.json_text.members import elements, members, unquote
from cdc.model import TableSchema
from sinks.opensearch.client import Client, path_of


@dataclass(frozen=True, slots=True)
class Route:
    """How the documents of one table are routed; `probes` has a routing value for each shard."""

    column: str = ""
    in_key: bool = False
    probes: tuple[str, ...] = ()

    @property
    def scattered(self) -> bool:
        """Whether copies of a key can lie on several shards."""
        return bool(self.column) and not self.in_key and len(self.probes) > 1

    def of(self, key: str, image: str) -> str | None:
        """The routing of a row; None is OpenSearch's own, by the id. The image of a deleted row is empty."""
        if not self.column or not (self.in_key or image):
            return None
        raw = members(key if self.in_key else image).get(self.column, "null")
        return None if raw == "null" else unquote(raw)


@dataclass(frozen=True, slots=True)
class Copy:
    """One document of a key; `source` is its JSON."""

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
    answer = client.json("GET", path_of(index, "_settings", "index.number_of_shards"))
    shards = int(next(iter(answer.values()))["settings"]["index"]["number_of_shards"])
    return Route(column, probes=_probes(client, index, shards))


def _probes(client: Client, index: str, shards: int) -> tuple[str, ...]:
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
    """Every document of these ids on every shard, as it is now (not as of the last refresh).

    `only` leaves every other field out of them. The trap: the server then prints them anew, which damages numbers.
    """
    documents = [{"_id": one, "routing": probe} for one in ids for probe in route.probes]
    found: dict[str, list[Copy]] = {}
    if not documents:
        return found
    more = {"_source_includes": only} if only else {}
    answer = members(client.text("POST", path_of(index, "_mget"), {"docs": documents}, **more))
    for document in map(members, elements(answer["docs"])):
        if document.get("found") == "true":
            routing = unquote(document["_routing"]) if "_routing" in document else None
            copy = Copy(int(document["_version"]), routing, document["_source"])
            found.setdefault(unquote(document["_id"]), []).append(copy)
    return found

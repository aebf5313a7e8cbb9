"""Bulk requests: bodies made of the log's own bytes, and the outcome of each item.

An item that was written before answers 409, and that is success: the stored version is at least the given one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import orjson

from cdc.errors import Busy
from cdc.json_text.members import quote
from sinks.opensearch.client import Blocked, Client, RequestRefused, TimedOut, path_of

_FIELD = re.compile(r"field \[([^\]]*)\] of type \[([^\]]*)\]")
_ROUNDS = 4
_PAUSE = 0.2
_SMALLEST = 4096  # a few documents: each goes to one shard, and so asks for little room at once


@dataclass(frozen=True, slots=True)
class Item:
    """One document to write. `body` is its action and its source, each ending in a line break."""

    key: str
    version: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """An item that will never be taken, and why, without values."""

    item: Item
    reason: str


class IndexGone(Exception):
    """The alias that is written to does not exist."""


def item(key: str, version: int, identity: bytes, source: bytes, routing: str | None = None) -> Item:
    """`source` is a JSON object; a raw line break in it can only be white space, and would end the line."""
    to = b"" if routing is None else b',"routing":' + quote(routing).encode()
    action = b'{"index":{"_id":%b,"version":%d,"version_type":"external"%b}}\n' % (identity, version, to)
    return Item(key, version, action + (source.replace(b"\n", b" ") if b"\n" in source else source) + b"\n")


class Bulk:
    """Sends items to one alias. `limit` is the size of a request in bytes: an overloaded server gets smaller ones, and
    larger ones again as it takes them."""

    def __init__(self, client: Client, limit: int, refresh: str, wait: Callable[[float], None]) -> None:
        self.client = client
        self.limit = limit
        self._largest = limit
        self._refresh = refresh
        self._wait = wait

    def send(self, alias: str, items: Sequence[Item]) -> list[Refusal]:
        """On return every item is stored or refused for ever. Raises Busy, Lost or IndexGone.

        What the server has no room for is sent again, and only that, for as long as some of it is taken each time:
        to begin again with all items would never end where all of them are too many.
        """
        refusals: list[Refusal] = []
        waiting, stalled = list(items), 0
        while waiting:
            again: list[Item] = []
            for chunk in self._chunks(waiting, self.limit):
                again += self._send(alias, chunk, refusals)
            if not again:
                self.limit = min(self._largest, self.limit * 5 // 4 + 1)
                break
            self.limit = max(_SMALLEST, self.limit // 2)
            stalled = stalled + 1 if len(again) == len(waiting) else 0
            if stalled == _ROUNDS:
                raise Busy(f"OpenSearch has no room for {len(again)} document(s) of {alias}.", "It is tried again.")
            self._wait(_PAUSE * 2**stalled)
            waiting = again
        return refusals

    def _chunks(self, items: Sequence[Item], limit: int) -> Iterator[list[Item]]:
        chunk: list[Item] = []
        size = 0
        for one in items:
            if chunk and size + len(one.body) > limit:
                yield chunk
                chunk, size = [], 0
            chunk.append(one)
            size += len(one.body)
        if chunk:
            yield chunk

    def _send(self, alias: str, chunk: list[Item], refusals: list[Refusal]) -> list[Item]:
        """One request; returns what is worth sending again."""
        params = {"require_alias": "true", "filter_path": "errors,items.*.status,items.*.error"}
        if self._refresh:
            params["refresh"] = self._refresh
        try:
            body = b"".join([one.body for one in chunk])
            answer = orjson.loads(self.client.text("POST", path_of(alias) + "/_bulk", body, **params))
        except Blocked:
            raise
        except Busy:
            return chunk
        except TimedOut as late:  # not as a loss: a new connection would begin again with requests as large as this one
            self.limit = max(_SMALLEST, self.limit // 2)
            raise Busy(late.message, "It is tried again with smaller requests.") from None
        except RequestRefused as refused:
            return self._refused(alias, chunk, refused, refusals)
        if not answer["errors"]:
            return []
        return self._outcomes(alias, chunk, [found["index"] for found in answer["items"]], refusals)

    def _refused(self, alias: str, chunk: list[Item], refused: RequestRefused, refusals: list[Refusal]) -> list[Item]:
        """The whole request was turned down: too large (413), or unreadable. Halves tell because of which item."""
        if refused.kind == "index_not_found_exception":
            raise IndexGone
        if len(chunk) == 1:
            refusals.append(Refusal(chunk[0], f"{refused.status} {refused.kind}"))
            return []
        middle = len(chunk) // 2
        return self._send(alias, chunk[:middle], refusals) + self._send(alias, chunk[middle:], refusals)

    def _outcomes(
        self, alias: str, chunk: list[Item], outcomes: list[dict[str, object]], refusals: list[Refusal]
    ) -> list[Item]:
        again: list[Item] = []
        for one, outcome in zip(chunk, outcomes, strict=True):
            status, error = int(str(outcome["status"])), outcome.get("error")
            kind = str(error.get("type", "error")) if isinstance(error, dict) else "error"
            if status < 300 or status == 409:
                continue
            if kind == "cluster_block_exception":
                raise self.client.blocked(alias)
            if kind == "index_not_found_exception":
                raise IndexGone
            if kind == "index_closed_exception":
                raise self.client.closed(alias)
            if status == 429 or status >= 500:
                again.append(one)
            else:
                refusals.append(Refusal(one, reason_of(error)))
        return again


def reason_of(error: object) -> str:
    """The types of an error and its causes, and the field it names. Sentences are left out: they quote values."""
    kinds: list[str] = []
    field = ""
    while isinstance(error, dict):
        kinds.append(str(error.get("type", "error")))
        if not field and (match := _FIELD.search(str(error.get("reason", "")))):
            field = f" (field {match[1]} of type {match[2]})"
        error = error.get("caused_by")
    return ", ".join(dict.fromkeys(kinds)) + field

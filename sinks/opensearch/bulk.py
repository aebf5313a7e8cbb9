"""Bulk requests, made of the bytes that are in the log, and the outcome of each item.

Status 409 is success: the stored version is the same or newer.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import orjson

from cdc.errors import Busy
from cdc.json_text.members import quote
from sinks.opensearch.client import Blocked, Client, RequestRefused, TimedOut, path_of

_FIELD = re.compile(r"field \[([^\]]*)\] of type \[([^\]]*)\]")
_STALLED_ROUNDS = 4
_PAUSE = 0.2
_SMALLEST = 4096  # bytes: a few documents, which ask each shard for little memory at once


@dataclass(frozen=True, slots=True)
class Item:
    """One document to write. `body` is its action and its source, each ending in a line break."""

    key: str
    version: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """An item that OpenSearch refuses permanently, and the reason, without row values."""

    item: Item
    reason: str


class IndexGone(Exception):
    """The alias of the write does not exist."""


def item(key: str, version: int, identity: bytes, source: bytes, routing: str | None = None) -> Item:
    """`source` is a JSON object. A raw line break in it is white space, and would end the line: it becomes a space."""
    routed = b"" if routing is None else b',"routing":' + quote(routing).encode()
    action = b'{"index":{"_id":%b,"version":%d,"version_type":"external"%b}}\n' % (identity, version, routed)
    return Item(key, version, action + (source.replace(b"\n", b" ") if b"\n" in source else source) + b"\n")


class Bulk:
    """Sends items to an alias. `limit` is the size of a request in bytes: it shrinks while the server is overloaded and
    grows again when requests succeed."""

    def __init__(self, client: Client, limit: int, refresh: str, wait: Callable[[float], None]) -> None:
        self.client = client
        self.limit = limit
        self._largest = limit
        self._refresh = refresh
        self._wait = wait

    def send(self, alias: str, items: Sequence[Item]) -> list[Refusal]:
        """Return when every item is stored or permanently refused. Raises Busy, Lost or IndexGone.

        Items that the server rejects because of load are sent again, and only those, while each round stores some of
        them: repeating all items would never end if together they are too many.
        """
        refusals: list[Refusal] = []
        waiting, stalled = list(items), 0
        while waiting:
            retried: list[Item] = []
            for chunk in self._chunks(waiting, self.limit):
                retried += self._send(alias, chunk, refusals)
            if not retried:
                self.limit = min(self._largest, self.limit * 5 // 4 + 1)
                break
            self.limit = max(_SMALLEST, self.limit // 2)
            stalled = stalled + 1 if len(retried) == len(waiting) else 0
            if stalled == _STALLED_ROUNDS:
                message = f"OpenSearch is overloaded and rejects {len(retried)} document(s) of {alias}."
                raise Busy(message, "Millrace retries.")
            self._wait(_PAUSE * 2**stalled)
            waiting = retried
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
        """Send one request; returns the items to send again."""
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
        except TimedOut as late:  # not Lost: after a reconnect the requests would be as large as this one
            self.limit = max(_SMALLEST, self.limit // 2)
            raise Busy(late.message, "Millrace retries with smaller requests.") from None
        except RequestRefused as refused:
            return self._send_halves(alias, chunk, refused, refusals)
        if not answer["errors"]:
            return []
        return self._outcomes(alias, chunk, [found["index"] for found in answer["items"]], refusals)

    def _send_halves(
        self, alias: str, chunk: list[Item], refused: RequestRefused, refusals: list[Refusal]
    ) -> list[Item]:
        """The whole request was refused: too large (413) or unreadable. Send halves to find the item at fault."""
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
        retried: list[Item] = []
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
                retried.append(one)
            else:
                refusals.append(Refusal(one, reason_of(error)))
        return retried


def reason_of(error: object) -> str:
    """The types of an error and its causes, and the field it names. Reason texts are left out: they quote values."""
    kinds: list[str] = []
    field = ""
    while isinstance(error, dict):
        kinds.append(str(error.get("type", "error")))
        if not field and (match := _FIELD.search(str(error.get("reason", "")))):
            field = f" (field {match[1]} of type {match[2]})"
        error = error.get("caused_by")
    return ", ".join(dict.fromkeys(kinds)) + field

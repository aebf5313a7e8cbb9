"""The messages to and from backfills in the WAL: JSON in logical messages with the prefix `millrace`. Pure.

Every role that can connect to the database can send such a message, and the stream does not contain its sender. So a
request must be signed with the key in the state folder, and our own messages have a secret token. A signed request may
be sent several times: a copy of it can repeat the same request, but not make another one.
"""

import hmac
import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from cdc.key_range import KeyRange
from cdc.model import TableId

_VERBS = ("pause", "resume", "cancel")


@dataclass(frozen=True, slots=True)
class Request:
    """Read a table again: all of it, the rows under a condition, those since a value of a column, or these keys."""

    table: TableId
    where: str = ""
    since: tuple[str, str] | None = None
    keys: tuple[tuple[str, ...], ...] = ()
    newest: bool = False
    """The rows get versions above all changes committed before the request."""
    removed: tuple[str, ...] = ()
    """Key ranges (`cdc.key_range`) whose rows from before the request are removed once the rows have been read."""

    def facts(self) -> dict[str, object]:
        """For JSON; the inverse of `of_facts`."""
        body: dict[str, object] = {"table": str(self.table)}
        if self.where:
            body["where"] = self.where
        if self.since:
            body["since"] = list(self.since)
        if self.keys:
            body["keys"] = [list(key) for key in self.keys]
        if self.newest:
            body["newest"] = True
        if self.removed:
            body["removed"] = list(self.removed)
        return body

    @classmethod
    def of_facts(cls, body: dict[str, Any]) -> "Request":
        """Raises ValueError, KeyError or TypeError on anything that `facts` does not return."""
        where = body.get("where", "")
        if not isinstance(where, str):
            raise TypeError("where")
        since = body.get("since")
        keys = tuple(tuple(str(value) for value in key) for key in body.get("keys", ()))
        pair = (str(since[0]), str(since[1])) if since else None
        removed = tuple(KeyRange.parse(str(text)).text() for text in body.get("removed", ()))
        return cls(TableId.parse(str(body["table"])), where, pair, keys, body.get("newest") is True, removed)


@dataclass(frozen=True, slots=True)
class JobControl:
    """Pause, resume or cancel one backfill; id `all`: every one."""

    verb: str
    id: str


@dataclass(frozen=True, slots=True)
class ChunkMark:
    """The low or the high mark of a chunk."""

    high: bool
    token: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A backfill failed."""

    id: str
    token: str
    reason: str


@dataclass(frozen=True, slots=True)
class TableRestart:
    """A table begins again: the log's rows of it are truncated here."""

    id: str
    token: str


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A message that is ignored. `reason` has nothing of its content."""

    reason: str


_UNSIGNED = RefusedRequest("it is not signed with this pipeline's key; use: millrace backfill, or its option --sql")
Message = Request | JobControl | ChunkMark | Ended | TableRestart | RefusedRequest


def backfill_message(request: Request, key: bytes) -> str:
    """The signed message that requests a backfill."""
    body = request.facts()
    return json.dumps({"backfill": body, "signature": _signature(body, key)}, ensure_ascii=False)


def control_message(verb: str, identity: str, key: bytes) -> str:
    """The signed message that pauses, resumes or cancels a backfill."""
    body: dict[str, object] = {verb: identity}
    return json.dumps({**body, "signature": _signature(body, key)})


def chunk_message(high: bool, token: str) -> str:
    """The message that is the low or high mark of a chunk."""
    return json.dumps({"high" if high else "low": token})


def ended_message(identity: str, token: str, reason: str) -> str:
    """The message that records that a backfill failed."""
    return json.dumps({"ended": identity, "token": token, "reason": reason}, ensure_ascii=False)


def restart_message(identity: str, token: str) -> str:
    """The message that makes a table begin again."""
    return json.dumps({"anew": identity, "token": token})


def parse_message(content: bytes, key: bytes) -> Message:
    """Parse a message. Never raises: an invalid one becomes a RefusedRequest."""
    try:
        body = json.loads(content)
        if "backfill" in body:
            return _request(body, key)
        if "low" in body or "high" in body:
            return ChunkMark("high" in body, str(body.get("high", body.get("low"))))
        if "ended" in body:
            return Ended(str(body["ended"]), str(body["token"]), str(body["reason"]))
        if "anew" in body:
            return TableRestart(str(body["anew"]), str(body["token"]))
        verb = next(verb for verb in _VERBS if verb in body)
        return JobControl(verb, str(body[verb])) if _signed(body, {verb: str(body[verb])}, key) else _UNSIGNED
    except (ValueError, KeyError, TypeError, StopIteration, AttributeError, RecursionError):
        return RefusedRequest("this version does not know such a request")


def _request(body: dict[str, Any], key: bytes) -> Request | RefusedRequest:
    request = Request.of_facts(body["backfill"])
    return request if _signed(body, request.facts(), key) else _UNSIGNED


def _signed(body: dict[str, Any], signed: dict[str, object], key: bytes) -> bool:
    given = str(body.get("signature", "")).encode(errors="replace")
    return hmac.compare_digest(given, _signature(signed, key).encode())


def _signature(body: dict[str, object], key: bytes) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), sha256).hexdigest()

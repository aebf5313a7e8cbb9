"""What is said to and by the backfills through the WAL: JSON in logical messages with the prefix `millrace`. Pure.

Everybody who may connect to the database may send such a message, and the stream does not tell who did. So a request
counts only with a signature made with the key in the state folder, and our own marks with a token that only we know. A
signed request is good as often as it is sent: whoever has its text may ask for the same again, and for nothing else.
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
    """The rows count as newer than everything that was committed before the request."""
    removed: tuple[str, ...] = ()
    """Ranges of keys (`cdc.key_range`): what they hold from before the request goes, once the rows have been read."""

    def facts(self) -> dict[str, object]:
        """For JSON; the opposite of `of_facts`."""
        said: dict[str, object] = {"table": str(self.table)}
        if self.where:
            said["where"] = self.where
        if self.since:
            said["since"] = list(self.since)
        if self.keys:
            said["keys"] = [list(key) for key in self.keys]
        if self.newest:
            said["newest"] = True
        if self.removed:
            said["removed"] = list(self.removed)
        return said

    @classmethod
    def of_facts(cls, said: dict[str, Any]) -> "Request":
        """Raises ValueError, KeyError or TypeError on anything that `facts` does not give."""
        where = said.get("where", "")
        if not isinstance(where, str):
            raise TypeError("where")
        since = said.get("since")
        keys = tuple(tuple(str(value) for value in key) for key in said.get("keys", ()))
        pair = (str(since[0]), str(since[1])) if since else None
        removed = tuple(KeyRange.parse(str(text)).text() for text in said.get("removed", ()))
        return cls(TableId.parse(str(said["table"])), where, pair, keys, said.get("newest") is True, removed)


@dataclass(frozen=True, slots=True)
class JobControl:
    """Pause, resume or cancel one backfill; `all` for every one."""

    verb: str
    id: str


@dataclass(frozen=True, slots=True)
class ChunkMark:
    """One of our own marks: the low or the high one of a chunk."""

    high: bool
    token: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A backfill of ours cannot go on."""

    id: str
    token: str
    reason: str


@dataclass(frozen=True, slots=True)
class TableRestart:
    """A backfill of ours begins with an empty table: what the log held of it is over."""

    id: str
    token: str


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A message that is not obeyed. `reason` holds nothing of its content."""

    reason: str


_UNSIGNED = RefusedRequest("it is not signed with this pipeline's key; use: millrace backfill, or its option --sql")
Said = Request | JobControl | ChunkMark | Ended | TableRestart | RefusedRequest


def ask(request: Request, key: bytes) -> str:
    """The message that asks for a backfill, signed."""
    said = request.facts()
    return json.dumps({"backfill": said, "signature": _signature(said, key)}, ensure_ascii=False)


def steer(verb: str, identity: str, key: bytes) -> str:
    """The message that steers one, signed."""
    said: dict[str, object] = {verb: identity}
    return json.dumps({**said, "signature": _signature(said, key)})


def edge(high: bool, token: str) -> str:
    """The message that marks an edge of a chunk."""
    return json.dumps({"high" if high else "low": token})


def ended(identity: str, token: str, reason: str) -> str:
    """The message by which a failed backfill is noted in its place."""
    return json.dumps({"ended": identity, "token": token, "reason": reason}, ensure_ascii=False)


def anew(identity: str, token: str) -> str:
    """The message by which the log is told that a table begins again."""
    return json.dumps({"anew": identity, "token": token})


def understand(content: bytes, key: bytes) -> Said:
    """Read a message. Never raises: whatever is not understood is refused."""
    try:
        said = json.loads(content)
        if "backfill" in said:
            return _request(said, key)
        if "low" in said or "high" in said:
            return ChunkMark("high" in said, str(said.get("high", said.get("low"))))
        if "ended" in said:
            return Ended(str(said["ended"]), str(said["token"]), str(said["reason"]))
        if "anew" in said:
            return TableRestart(str(said["anew"]), str(said["token"]))
        verb = next(verb for verb in _VERBS if verb in said)
        return JobControl(verb, str(said[verb])) if _signed(said, {verb: str(said[verb])}, key) else _UNSIGNED
    except (ValueError, KeyError, TypeError, StopIteration, AttributeError, RecursionError):
        return RefusedRequest("it is not a request that this version knows")


def _request(said: dict[str, Any], key: bytes) -> Request | RefusedRequest:
    request = Request.of_facts(said["backfill"])
    return request if _signed(said, request.facts(), key) else _UNSIGNED


def _signed(said: dict[str, Any], meant: dict[str, object], key: bytes) -> bool:
    given = str(said.get("signature", "")).encode(errors="replace")
    return hmac.compare_digest(given, _signature(meant, key).encode())


def _signature(said: dict[str, object], key: bytes) -> str:
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), sha256).hexdigest()

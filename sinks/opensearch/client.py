"""Requests to OpenSearch as text in and text out, and what its errors mean.

The client library does connections, TLS and credentials; bodies are ours, since parsing and printing would damage
numbers. Error messages name an error's type and status, never its sentence: those quote values.
"""

import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import orjson
from opensearchpy import JSONSerializer, OpenSearch
from opensearchpy.exceptions import ConnectionError, ConnectionTimeout, SSLError, TransportError

from cdc.config.secret import Secret
from cdc.errors import Busy, Lost, MillraceError, SinkError, StoreRefused

_TIMEOUT = 60.0
_OVERLOADED = {429, 502, 503, 504}


class _AsText(JSONSerializer):
    """Leaves a JSON answer as it came."""

    def loads(self, s: str) -> str:
        return s


class RequestRefused(SinkError):
    """An answer that the caller may know how to take: its status and the error's type."""

    def __init__(self, status: int, kind: str) -> None:
        super().__init__(f"OpenSearch answered {status} {kind}.", "Look at its log.")
        self.status = status
        self.kind = kind


class Blocked(Busy):
    """An index that takes no writes for now."""


class TimedOut(Lost):
    """No answer in time: the server may be working on it still."""


class Client:
    """One cluster. `sink` names the sink in errors."""

    def __init__(self, sink: str, url: str, username: str, password: Secret, ca_file: str) -> None:
        self._sink = sink
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        context = ssl.create_default_context(cafile=ca_file or None) if secure else None
        self._client = OpenSearch(
            hosts=[{"host": parts.hostname, "port": parts.port or (443 if secure else 9200), "url_prefix": parts.path}],
            http_auth=(username, password.reveal()) if username else None,
            use_ssl=secure,
            ssl_context=context,
            serializer=_AsText(),
            http_compress=False,
            timeout=_TIMEOUT,
            max_retries=0,  # the query decides when to try again
        )

    def text(self, method: str, path: str, body: bytes | object = None, **params: str) -> str:
        """The raw answer. Raises RequestRefused for a 4xx that is not about load or rights, else one of ours."""
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        headers = {"content-type": "application/x-ndjson" if path.endswith("_bulk") else "application/json"}
        try:
            answer = self._client.transport.perform_request(method, path, params=params, body=data, headers=headers)
        except TransportError as error:
            raise self._translated(error, path) from None
        return str(answer or "")

    def json(self, method: str, path: str, body: bytes | object = None, **params: str) -> dict[str, Any]:
        """The parsed answer, for what holds no rows."""
        return dict(orjson.loads(self.text(method, path, body, **params) or "{}"))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _translated(self, error: TransportError, path: str) -> MillraceError:
        name = f"sink {self._sink!r}: OpenSearch"
        if isinstance(error, ConnectionError):
            return _unreachable(name, error)
        status, kind = int(error.status_code), error_type(error.info)
        if kind == "cluster_block_exception":
            return self.blocked(path)
        if kind == "index_closed_exception":
            return self.closed(path)
        if status in _OVERLOADED:
            return Busy(f"{name} is overloaded ({status} {kind}).", "It is tried again.")
        if status in (401, 403):
            kind_of_error = StoreRefused if status == 401 else SinkError  # rights may be lacking for one index
            return kind_of_error(
                f"{name} refuses these credentials ({status} {kind}).",
                "The user needs create_index, manage, read and write on the prefix.",
            )
        return RequestRefused(status, kind)

    def blocked(self, place: str) -> Blocked:
        """The error for an index that takes no writes."""
        return Blocked(
            f"sink {self._sink!r}: OpenSearch blocks writes to {place}.",
            "Where its disk is full, free space; then remove index.blocks.read_only_allow_delete, or the block that "
            "was set by hand (index.blocks.read_only, index.blocks.write).",
            retry_after=5.0,
        )

    def closed(self, alias: str) -> Blocked:
        """The error for an index that was closed."""
        return Blocked(f"sink {self._sink!r}: the index behind {alias} is closed.", "Open it.", retry_after=1.0)


def _unreachable(name: str, error: ConnectionError) -> MillraceError:
    if isinstance(error, SSLError):
        return StoreRefused(f"{name} is not trusted: its certificate failed verification.", "Set ca_file.")
    if isinstance(error, ConnectionTimeout):
        return TimedOut(f"{name} did not answer in {_TIMEOUT:g} s.", "It is tried again.")
    return Lost(f"{name} cannot be reached ({type(error).__name__}).", "It is tried again.")


def error_type(info: object) -> str:
    """The type of an error answer."""
    error = info.get("error") if isinstance(info, Mapping) else None
    return str(error.get("type", "error")) if isinstance(error, Mapping) else "error"


def path_of(*parts: str) -> str:
    """A path with its parts escaped."""
    return "/" + "/".join(quote(part, safe="") for part in parts)

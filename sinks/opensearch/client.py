"""Requests to OpenSearch with JSON as text, and what its errors mean.

opensearch-py handles connections, TLS and credentials. Bodies stay text, because parsing and printing JSON would damage
numbers. Messages contain an error's type and status, never its reason text, which quotes values.
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


class _Unparsed(JSONSerializer):
    """Returns a JSON answer as text."""

    def loads(self, s: str) -> str:
        return s


class RequestRefused(SinkError):
    """An error answer that the caller may handle: its status and the error's type."""

    def __init__(self, status: int, kind: str) -> None:
        super().__init__(f"OpenSearch answered {status} {kind}.", "See the OpenSearch log.")
        self.status = status
        self.kind = kind


class Blocked(Busy):
    """An index that rejects writes for now."""


class TimedOut(Lost):
    """No answer in time: the server may still execute the request."""


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
            serializer=_Unparsed(),
            http_compress=False,
            timeout=_TIMEOUT,
            max_retries=0,  # the sink's query retries
        )

    def text(self, method: str, path: str, body: bytes | object = None, **params: str) -> str:
        """The answer as text. Raises RequestRefused for a 4xx other than overload or missing privilege."""
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        headers = {"content-type": "application/x-ndjson" if path.endswith("_bulk") else "application/json"}
        try:
            answer = self._client.transport.perform_request(method, path, params=params, body=data, headers=headers)
        except TransportError as error:
            raise self._translated(error, path) from None
        return str(answer or "")

    def json(self, method: str, path: str, body: bytes | object = None, **params: str) -> dict[str, Any]:
        """The parsed answer. Not for answers with rows: parsing damages their numbers."""
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
            return Busy(f"{name} is overloaded ({status} {kind}).", "Millrace retries.")
        if status in (401, 403):
            error_class = StoreRefused if status == 401 else SinkError  # 403 may concern one index only
            return error_class(
                f"{name} refuses these credentials ({status} {kind}).",
                "The user needs create_index, manage, read and write on the prefix.",
            )
        return RequestRefused(status, kind)

    def blocked(self, index: str) -> Blocked:
        """The error for an index that rejects writes."""
        return Blocked(
            f"sink {self._sink!r}: OpenSearch blocks writes to {index}.",
            "If its disk is full, free space. Then remove index.blocks.read_only_allow_delete, or the block that was "
            "set by hand (index.blocks.read_only, index.blocks.write).",
            retry_after=5.0,
        )

    def closed(self, alias: str) -> Blocked:
        """The error for a closed index."""
        return Blocked(f"sink {self._sink!r}: the index behind {alias} is closed.", "Open the index.", retry_after=1.0)


def _unreachable(name: str, error: ConnectionError) -> MillraceError:
    if isinstance(error, SSLError):
        return StoreRefused(f"{name} is not trusted: its certificate failed verification.", "Set ca_file.")
    if isinstance(error, ConnectionTimeout):
        return TimedOut(f"{name} did not answer in {_TIMEOUT:g} s.", "Millrace retries.")
    return Lost(f"{name} cannot be reached ({type(error).__name__}).", "Millrace retries.")


def error_type(info: object) -> str:
    """The error's type in an error answer."""
    error = info.get("error") if isinstance(info, Mapping) else None
    return str(error.get("type", "error")) if isinstance(error, Mapping) else "error"


def path_of(*parts: str) -> str:
    """A path with its parts escaped."""
    return "/" + "/".join(quote(part, safe="") for part in parts)

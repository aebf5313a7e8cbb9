"""Access checks and size limits of the HTTP endpoint: the middleware in front of the routes.

Without a token the endpoint trusts programs on this machine only. A page of another site must neither read it, through
a host name that suddenly resolves to 127.0.0.1, nor make a browser send a request.
"""

import asyncio
import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cdc.config.loopback import is_loopback
from cdc.config.settings import HttpSettings
from cdc.errors import ConfigError

LARGEST_HEAD = 16 * 1024
LARGEST_BODY = 16 * 1024
LONGEST_REQUEST = 75.0
"""Seconds for a request with its response: more than the longest `wait`."""


def guard(http: HttpSettings) -> None:
    """Raise ConfigError if the endpoint would listen beyond this machine without a token."""
    if not is_loopback(http.host) and not http.token:
        raise ConfigError(
            f"http.host {http.host} is not loopback and http.token is empty.",
            "Set http.token (for example ${MILLRACE_HTTP_TOKEN}), or listen on 127.0.0.1.",
        )


class Token:
    """Requires `Authorization: Bearer …` on every path except the open ones."""

    def __init__(self, app: ASGIApp, expected: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._expected = f"Bearer {expected}".encode()
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self._expected):
                answer = JSONResponse({"error": "a token is needed"}, 401, {"www-authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class SameSite:
    """Refuses what a page of another site can make a browser send: a foreign host name, and POSTs from that site."""

    def __init__(self, app: ASGIApp, local_only: bool) -> None:
        self._app = app
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))):
            await JSONResponse({"error": refusal}, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> str:
        host = request.headers.get("host", "")
        if self._local_only and not is_loopback(_name(host)):
            return (
                "without a token this endpoint answers only requests to localhost; set http.token for other host names"
            )
        if request.method in ("GET", "HEAD"):
            return ""
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return "this request comes from another site"
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "this request comes from another site"
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return "send content-type: application/json; a form of another site cannot"
        return ""


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Bounds:
    """Refuses headers or a body that are too large, and ends requests that take too long. The parser's own limit
    applies only to headers that arrive in several reads."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > LARGEST_HEAD:
            await JSONResponse({"error": "the request's headers are too large"}, 431)(scope, receive, send)
            return
        try:
            async with asyncio.timeout(LONGEST_REQUEST):
                await self._app(scope, _limited(receive), send)
        except _TooLarge:
            await JSONResponse({"error": "the request's body is too large"}, 413)(scope, receive, send)


class _TooLarge(Exception):
    pass


def _limited(receive: Receive) -> Receive:
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > LARGEST_BODY:
            raise _TooLarge
        return message

    return limited

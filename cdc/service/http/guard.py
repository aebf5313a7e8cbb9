"""Who may ask what of the endpoint, and how much: the layers in front of the routes.

Without a token the endpoint trusts this machine and nobody else: a page on another site must neither read it (a name
that suddenly means 127.0.0.1) nor make a browser send it something.
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
"""Seconds, with everything: longer than the longest wait that may be asked for."""


def guard(http: HttpSettings) -> None:
    """Refuse to listen beyond this machine without a token."""
    if not is_loopback(http.host) and not http.token:
        raise ConfigError(
            f"http.host {http.host} is not loopback and http.token is empty.",
            "Set http.token (for instance ${MILLRACE_HTTP_TOKEN}), or listen on 127.0.0.1.",
        )


class Token:
    """Asks for `Authorization: Bearer …` on everything but the open paths."""

    def __init__(self, app: ASGIApp, expected: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._expected = f"Bearer {expected}".encode()
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                answer = JSONResponse({"error": "a token is needed"}, 401, {"www-authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class SameSite:
    """Refuses what a foreign page can make a browser send: a host name that is not ours, and posts from elsewhere."""

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
            return "without a token this endpoint answers only to localhost; set http.token for any other name"
        if request.method in ("GET", "HEAD"):
            return ""
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return "this request comes from another site"
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "this request comes from another site"
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return "send application/json: no form of another site can"
        return ""


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Bounds:
    """Refuses a head or a body that is too large, and ends what takes too long. The parser's own limit counts only
    heads that arrive in pieces."""

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
                await self._app(scope, _counted(receive), send)
        except _TooLarge:
            await JSONResponse({"error": "the request's body is too large"}, 413)(scope, receive, send)


class _TooLarge(Exception):
    pass


def _counted(receive: Receive) -> Receive:
    taken = 0

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > LARGEST_BODY:
            raise _TooLarge
        return message

    return counted

"""The health endpoint. Answers from small files and from memory; never waits for a store."""

import asyncio
import hmac
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import cdc.log
from cdc.config import HttpSettings, Settings
from cdc.errors import ConfigError, EnvironmentFault, MillraceError
from cdc.model import ZERO_LSN, format_lsn, parse_lsn
from cdc.service import status
from cdc.service.flow import Flow, flow
from cdc.service.health import reasons
from cdc.service.history import History
from cdc.service.metrics import exposition
from cdc.service.reached import Positions
from cdc.service.why import events

_LONGEST_WAIT = 60.0
_LONGEST_SEARCH = 20.0
_LARGEST_HEAD = 16 * 1024
_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:",
    "x-content-type-options": "nosniff",
}
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def guard(http: HttpSettings) -> None:
    """Refuse to listen beyond this machine without a token."""
    if http.host not in _LOOPBACK and not http.token:
        raise ConfigError(
            f"http.host {http.host} is not loopback and http.token is empty.",
            "Set http.token (for instance ${MILLRACE_HTTP_TOKEN}), or listen on 127.0.0.1.",
        )


class Token:
    """Asks for `Authorization: Bearer …` on everything but `/livez`."""

    def __init__(self, app: ASGIApp, expected: str) -> None:
        self._app = app
        self._expected = f"Bearer {expected}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/livez":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await JSONResponse({"error": "a token is needed"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Bounds:
    """Refuses a head that is too large. The parser's own limit counts only heads that arrive in pieces."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if sum(len(name) + len(value) for name, value in scope.get("headers", ())) > _LARGEST_HEAD:
            await JSONResponse({"error": "the request's headers are too large"}, 431)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class Endpoint:
    """The routes, over one pipeline's state folder and log."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reader = cdc.log.open_reader(settings)
        self._positions = Positions(settings, self._reader)
        self._history = History(self._flow)
        self._sinks = tuple(sink.name for sink in settings.sinks)

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/livez", self.livez),
            *(Route(path, self.readyz) for path in ("/readyz", "/healthz", "/health")),
            Route("/metrics", self.metrics),
            Route("/v1/status", self.status),
            Route("/v1/wait", self.wait),
            Route("/v1/cut", self.cut),
            Route("/v1/flow", self.flow),
            Route("/v1/history", self.history),
            Route("/v1/why", self.why),
            *(Route(path, _page(name, kind)) for path, (name, kind) in _PAGE.items()),
        ]
        token = self._settings.http.token
        guards = [Middleware(Token, expected=token.reveal())] if token else []
        return Starlette(routes=routes, middleware=[Middleware(Bounds), *guards], lifespan=self._sampling)

    @asynccontextmanager
    async def _sampling(self, _: Starlette) -> AsyncIterator[None]:
        self._history.start()
        yield
        self._history.stop()

    def _flow(self) -> Flow:
        capture, apply = self._facts()
        return flow(capture, apply, self._positions.reached(), self._positions.head())

    def _facts(self) -> tuple[dict[str, object], dict[str, object]]:
        state = self._settings.state
        return status.read(state, "capture"), status.read(state, "apply")

    async def livez(self, _: Request) -> Response:
        """The daemon's own loop turns."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """200 when every part and sink works; else 503 with the reasons."""
        capture, apply = self._facts()
        found = reasons(capture, apply, self._sinks, datetime.now(UTC))
        body = {"ready": not found, "reasons": [asdict(reason) for reason in found]}
        return JSONResponse(body, 200 if not found else 503)

    async def metrics(self, _: Request) -> Response:
        """Prometheus text."""
        capture, apply = self._facts()
        text = exposition(capture, apply, self._positions.reached(), self._positions.head())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, _: Request) -> Response:
        """Everything the parts said, and each sink's position."""
        capture, apply = self._facts()
        reached = {name: format_lsn(lsn) for name, lsn in self._positions.reached().items()}
        head = format_lsn(self._positions.head())
        return JSONResponse({"capture": capture, "apply": apply, "log": {"head": head}, "reached": reached})

    async def wait(self, request: Request) -> Response:
        """Answers once a sink (default: all) holds everything up to an LSN; 504 after the timeout."""
        try:
            wanted = parse_lsn(request.query_params["lsn"])
            timeout = min(float(request.query_params.get("timeout", "10")), _LONGEST_WAIT)
            asked = self._positions.known(request.query_params.getlist("sink"))
        except (KeyError, ValueError):
            return JSONResponse({"error": "give lsn=16/B374D848, and timeout in seconds"}, 400)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 404)
        deadline = time.monotonic() + timeout
        while behind := self._positions.behind(wanted, asked):
            if time.monotonic() >= deadline:
                return JSONResponse({"reached": False, "lsn": format_lsn(wanted), "behind": behind}, 504)
            await asyncio.sleep(0.02)
        return JSONResponse({"reached": True, "lsn": format_lsn(wanted)})

    async def cut(self, _: Request) -> Response:
        """The newest LSN that every sink has reached."""
        return JSONResponse({"lsn": format_lsn(min(self._positions.reached().values(), default=ZERO_LSN))})

    async def flow(self, _: Request) -> Response:
        """The page's picture."""
        return JSONResponse(asdict(self._flow()))

    async def history(self, _: Request) -> Response:
        """The page's plots."""
        samples = [asdict(sample) for sample in self._history.samples()]
        return JSONResponse({"sinks": self._sinks, "samples": samples})

    async def why(self, request: Request) -> Response:
        """Every event of a key, and how many of them each sink has applied."""
        table, key = request.query_params.get("table", ""), request.query_params.get("key", "")
        try:
            found = await asyncio.to_thread(events, self._reader, table, key, _LONGEST_SEARCH)
        except MillraceError as error:
            return JSONResponse({"error": str(error)}, 400 if isinstance(error, ConfigError) else 503)
        reached = self._positions.reached()
        applied = [{"name": n, "applied": sum(event.end <= lsn for event in found)} for n, lsn in reached.items()]
        return JSONResponse({"events": [asdict(event) for event in found], "sinks": applied})


def _page(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("cdc.service").joinpath("page", name).read_bytes()

    async def serve(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return serve


class Server:
    """The endpoint on its port, in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        guard(settings.http)
        self._settings = settings.http
        config = uvicorn.Config(
            Endpoint(settings).app(),
            http="h11",  # bounds a request's head, which httptools does not
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=512,
            timeout_keep_alive=5,
            h11_max_incomplete_event_size=_LARGEST_HEAD,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._socket = socket.socket(socket.AF_INET6 if ":" in settings.http.host else socket.AF_INET)

    def _serve(self) -> None:
        self._server.run([self._socket])

    def __enter__(self) -> "Server":
        self._listen()
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def _listen(self) -> None:
        host, port = self._settings.host, self._settings.port
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(256)
        except OSError as error:
            self._socket.close()
            raise EnvironmentFault(
                f"The HTTP endpoint cannot listen on {host}:{port}: {error.strerror}.",
                "Choose another with the setting http.port.",
            ) from None

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()

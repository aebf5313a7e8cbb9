"""What the endpoint answers. Everything comes from the observer's memory; only `why` and the dead letters read files,
and they do so in threads of their own."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cdc.config import Settings
from cdc.errors import ConfigError, MillraceError
from cdc.model import ZERO_LSN, Lsn, format_lsn, parse_lsn
from cdc.service import openapi
from cdc.service.flow import flow
from cdc.service.history import History
from cdc.service.http_control import Control
from cdc.service.http_guard import Bounds, SameSite, Token
from cdc.service.metrics import exposition
from cdc.service.metrics_families import FAMILIES
from cdc.service.observer import Observer
from cdc.service.why import Story, story

LONGEST_WAIT = 60.0
_LONGEST_SEARCH = 20.0
_SEARCHES = 2  # at a time: each reads the log from its start
_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/plots.js": ("plots.js", "text/javascript"),
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Endpoint:
    """The routes, over one pipeline."""

    def __init__(self, settings: Settings) -> None:
        self.observer = Observer(settings)
        self._history = History()
        self.observer.samplers.append(self._history.offer)
        self._control = Control(self.observer)
        self._moved = asyncio.Event()
        self._searches = asyncio.Semaphore(_SEARCHES)

    def app(self) -> Starlette:
        """The ASGI application."""
        http = self.observer.settings.http
        token = [Middleware(Token, expected=http.token.reveal(), open_paths={"/livez", *_PAGE})] if http.token else []
        layers = [Middleware(Bounds), Middleware(SameSite, local_only=not http.token), *token]
        return Starlette(routes=self.routes(), middleware=layers, lifespan=self._observing)

    def routes(self) -> list[Route]:
        """Every path. What is described stands in `cdc.service.openapi`; the page's own files need no description."""
        described = [
            Route(operation.path, getattr(self, operation.name), methods=[operation.method])
            for operation in openapi.OPERATIONS
        ]
        return [*described, *(Route(path, _page(name, kind)) for path, (name, kind) in _PAGE.items())]

    @asynccontextmanager
    async def _observing(self, _: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        self.observer.changed = lambda: _soon(loop, self._wake)
        self.observer.start()
        yield
        self.observer.stop()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def livez(self, _: Request) -> Response:
        """The daemon's own loop turns."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """200 when every part and sink works; else 503 with the reasons."""
        found = self.observer.seen.reasons(self.observer.sinks)
        body = {"ready": not found, "reasons": [asdict(reason) for reason in found]}
        return JSONResponse(body, 200 if not found else 503)

    async def metrics(self, _: Request) -> Response:
        """Prometheus text."""
        text = exposition(self.observer.seen, FAMILIES)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, _: Request) -> Response:
        """Everything the parts said, and each sink's position."""
        seen = self.observer.seen
        reached = {name: format_lsn(lsn) for name, lsn in seen.reached.items()}
        said = {"capture": seen.capture, "apply": seen.apply, "daemon": seen.daemon}
        return JSONResponse({**said, "log": {"head": format_lsn(seen.head)}, "reached": reached})

    async def wait(self, request: Request) -> Response:
        """Answers once a sink (default: all) holds everything up to an LSN; 504 after the timeout."""
        try:
            wanted = parse_lsn(request.query_params["lsn"])
            timeout = min(float(request.query_params.get("timeout", "10")), LONGEST_WAIT)
            if math.isnan(timeout):
                raise ValueError
        except (KeyError, ValueError):
            return JSONResponse({"error": "give lsn=16/B374D848, and timeout in seconds"}, 400)
        asked = tuple(dict.fromkeys(request.query_params.getlist("sink"))) or self.observer.sinks
        unknown = [name for name in asked if name not in self.observer.sinks]
        if unknown:
            sinks = ", ".join(self.observer.sinks)
            return JSONResponse({"error": f"No sink is called {unknown[0]}. Sinks: {sinks}."}, 404)
        return await self._waited(wanted, asked, time.monotonic() + timeout)

    async def _waited(self, wanted: Lsn, asked: tuple[str, ...], deadline: float) -> Response:
        with self.observer.hurried():
            while True:
                moved = self._moved  # taken before the look: a move in between is not missed
                behind = self.observer.seen.behind(wanted, asked)
                if not behind:
                    return JSONResponse({"reached": True, "lsn": format_lsn(wanted)})
                left = deadline - time.monotonic()
                if left <= 0:
                    return JSONResponse({"reached": False, "lsn": format_lsn(wanted), "behind": behind}, 504)
                try:
                    await asyncio.wait_for(moved.wait(), left)
                except TimeoutError:
                    continue

    async def cut(self, _: Request) -> Response:
        """The newest LSN that every sink has reached."""
        seen = self.observer.seen
        lowest = min((seen.reached.get(name, ZERO_LSN) for name in self.observer.sinks), default=ZERO_LSN)
        return JSONResponse({"lsn": format_lsn(lowest)})

    async def flow(self, _: Request) -> Response:
        """The page's picture."""
        return JSONResponse(json.loads(json.dumps(asdict(flow(self.observer.seen)), default=str)))

    async def history(self, _: Request) -> Response:
        """The page's plots."""
        samples = [asdict(sample) for sample in self._history.samples()]
        return JSONResponse({"sinks": self.observer.sinks, "samples": samples})

    async def why(self, request: Request) -> Response:
        """Every event of a key and what became of it in each sink."""
        table, key = request.query_params.get("table", ""), request.query_params.get("key", "")
        if self._searches.locked():
            return JSONResponse({"error": "others are searching the log; try again in a moment"}, 429)
        async with self._searches:
            try:
                told = await asyncio.to_thread(self._story, table, key)
            except MillraceError as error:
                return JSONResponse({"error": str(error)}, 400 if isinstance(error, ConfigError) else 503)
        return JSONResponse(asdict(told))

    def _story(self, table: str, key: str) -> Story:
        observer = self.observer
        reached = observer.seen.reached
        return story(observer.settings, observer.reader, reached, table, key, seconds=_LONGEST_SEARCH)

    async def letters(self, request: Request) -> Response:
        """The parked changes."""
        return await self._control.letters(request)

    async def retry(self, request: Request) -> Response:
        """Try parked changes again."""
        return await self._control.retry(request)

    async def pause(self, request: Request) -> Response:
        """Let a sink or a table stand still."""
        return await self._control.pause(request)

    async def resume(self, request: Request) -> Response:
        """Let it go on."""
        return await self._control.resume(request)

    async def description(self, _: Request) -> Response:
        """The API's own description."""
        return JSONResponse(openapi.document())


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


def _page(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("cdc.service").joinpath("page", name).read_bytes()

    async def serve(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return serve

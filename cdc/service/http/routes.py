"""The routes of the HTTP endpoint. Responses come from the observer's memory; only `why` and the dead letters read
files, in threads of their own."""

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

from cdc.config.settings import Settings
from cdc.errors import ConfigError, MillraceError
from cdc.model import ZERO_LSN, Lsn, TableId, format_lsn, parse_lsn
from cdc.service.http import openapi
from cdc.service.http.control import Control
from cdc.service.http.guard import Bounds, SameSite, Token
from cdc.service.inspect.why import RowHistory, row_history
from cdc.service.observe.metric_families import FAMILIES
from cdc.service.observe.metrics import exposition
from cdc.service.observe.observer import Observer
from cdc.service.observe.page_model import page_model
from cdc.service.observe.samples import SampleHistory
from cdc.service.observe.uncovered import Excepted, Scope
from cdc.service.state.sink_positions import NO_POSITION

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
        self._history = SampleHistory()
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
        """Every path that `openapi` describes, and the files of the page."""
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
        """The daemon's event loop runs."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """200 when every part and sink works, else 503 with the reasons. Both name what the stores lack. A standby
        is ready, whatever the state of the daemon that it waits for."""
        if (active := self.observer.active_elsewhere) is not None:
            return JSONResponse({"ready": True, "state": "standby", "active": active(), "reasons": [], "except": []})
        seen = self.observer.seen
        found = seen.reasons(self.observer.sinks)
        lacking = _listed(seen.progress.excepted(Scope(self.observer.sinks)))
        body = {
            "ready": not found,
            "state": "active",
            "reasons": [asdict(reason) for reason in found],
            "except": lacking,
        }
        return JSONResponse(body, 200 if not found else 503)

    async def metrics(self, _: Request) -> Response:
        """Prometheus text."""
        text = exposition(self.observer.seen, FAMILIES)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, _: Request) -> Response:
        """The status of each part, and each sink's position."""
        seen = self.observer.seen
        reached = {name: format_lsn(lsn) for name, lsn in seen.reached.items()}
        parts = {"capture": seen.capture, "views": seen.views, "apply": seen.apply, "daemon": seen.daemon}
        return JSONResponse({**parts, "log": {"head": format_lsn(seen.head)}, "reached": reached})

    async def wait(self, request: Request) -> Response:
        """Responds once a sink (default: all) holds everything up to an LSN; 504 after the timeout. Both name what the
        stores lack."""
        try:
            wanted = parse_lsn(request.query_params["lsn"])
            timeout = min(float(request.query_params.get("timeout", "10")), LONGEST_WAIT)
            if math.isnan(timeout):
                raise ValueError
        except (KeyError, ValueError):
            return JSONResponse({"error": "pass an LSN, as in lsn=16/B374D848, and timeout in seconds"}, 400)
        try:
            scope = self._scope(request)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 404)
        return await self._wait(wanted, scope, time.monotonic() + timeout)

    def _scope(self, request: Request) -> Scope:
        """Raises ConfigError for a sink or a table that the pipeline does not have."""
        query = request.query_params
        sinks = tuple(dict.fromkeys(query.getlist("sink"))) or self.observer.sinks
        unknown = [name for name in sinks if name not in self.observer.sinks]
        if unknown:
            raise ConfigError(f"No sink is called {unknown[0]}. Sinks: {', '.join(self.observer.sinks)}.")
        tables = frozenset(_table(name) for name in query.getlist("table"))
        known = set(map(str, self.observer.settings.tables))
        if unknown := sorted(tables - known):
            raise ConfigError(f"No table is called {unknown[0]}. Tables: {', '.join(sorted(known))}.")
        return Scope(sinks, tables, query.get("except_waiting", "").lower() in ("1", "true", "yes"))

    async def _wait(self, wanted: Lsn, scope: Scope, deadline: float) -> Response:
        with self.observer.polling_fast():
            while True:
                moved = self._moved  # read before `seen`, so that a move in between is not missed
                progress = self.observer.seen.progress
                behind = progress.behind(wanted, scope)
                left = deadline - time.monotonic()
                if not behind or left <= 0:
                    lacking = _listed(progress.excepted(scope))
                    body = {"reached": not behind, "lsn": format_lsn(wanted), "except": lacking}
                    return JSONResponse(body) if not behind else JSONResponse({**body, "behind": behind}, 504)
                try:
                    await asyncio.wait_for(moved.wait(), left)
                except TimeoutError:
                    continue

    async def cut(self, request: Request) -> Response:
        """The newest LSN that every sink has reached, and what the stores lack."""
        try:
            scope = self._scope(request)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 404)
        seen = self.observer.seen
        positions = [seen.positions.get(name, NO_POSITION) for name in scope.sinks]
        reached = (position.reached_for(scope.tables, scope.except_waiting) for position in positions)
        lowest = min(reached, default=ZERO_LSN)
        return JSONResponse({"lsn": format_lsn(lowest), "except": _listed(seen.progress.excepted(scope))})

    async def flow(self, _: Request) -> Response:
        """The page's content."""
        return JSONResponse(json.loads(json.dumps(asdict(page_model(self.observer.seen)), default=str)))

    async def history(self, _: Request) -> Response:
        """The page's plots."""
        samples = [asdict(sample) for sample in self._history.samples()]
        return JSONResponse({"sinks": self.observer.sinks, "samples": samples})

    async def why(self, request: Request) -> Response:
        """Every event of a key and its outcome in each sink."""
        table, key = request.query_params.get("table", ""), request.query_params.get("key", "")
        if self._searches.locked():
            return JSONResponse({"error": "other searches of the log are running; try again in a moment"}, 429)
        async with self._searches:
            try:
                found = await asyncio.to_thread(self._row_history, table, key)
            except MillraceError as error:
                return JSONResponse({"error": str(error)}, 400 if isinstance(error, ConfigError) else 503)
        return JSONResponse(asdict(found))

    def _row_history(self, table: str, key: str) -> RowHistory:
        observer = self.observer
        positions = observer.seen.positions
        return row_history(observer.settings, observer.reader, positions, table, key, seconds=_LONGEST_SEARCH)

    async def dead_letters(self, request: Request) -> Response:
        """The newest dead letters."""
        return await self._control.dead_letters(request)

    async def retry(self, request: Request) -> Response:
        """Retry dead letters."""
        return await self._control.retry(request)

    async def pause(self, request: Request) -> Response:
        """Pause a sink or a table."""
        return await self._control.pause(request)

    async def skip(self, request: Request) -> Response:
        """Have a sink skip a table."""
        return await self._control.skip(request)

    async def resume(self, request: Request) -> Response:
        """Resume a sink or a table."""
        return await self._control.resume(request)

    async def description(self, _: Request) -> Response:
        """The API's own description."""
        return JSONResponse(openapi.document())


def _listed(found: list[Excepted]) -> list[dict[str, object]]:
    return [asdict(item) for item in found]


def _table(name: str) -> str:
    """The normal form of a table's name; an invalid name is returned unchanged, and not found later."""
    try:
        return str(TableId.parse(name))
    except ValueError:
        return name


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


def _page(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("cdc.service.http").joinpath("page", name).read_bytes()

    async def serve(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return serve

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

from cdc.config.settings import Settings
from cdc.errors import ConfigError, MillraceError
from cdc.model import ZERO_LSN, Lsn, TableId, format_lsn, parse_lsn
from cdc.service.http import openapi
from cdc.service.http.control import Control
from cdc.service.http.guard import Bounds, SameSite, Token
from cdc.service.inspect.why import RowHistory, story
from cdc.service.observe.metric_families import FAMILIES
from cdc.service.observe.metrics import exposition
from cdc.service.observe.observer import Observer
from cdc.service.observe.page_model import flow
from cdc.service.observe.samples import SampleHistory
from cdc.service.observe.uncovered import Asked, Excepted
from cdc.service.state.sink_positions import NOWHERE

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
        """Every path: those that `openapi` describes, and the page's own files."""
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
        """200 when every part and sink works; else 503 with the reasons. What the stores lack is said in both cases."""
        seen = self.observer.seen
        found = seen.reasons(self.observer.sinks)
        lacking = _listed(seen.standing.excepted(Asked(self.observer.sinks)))
        body = {"ready": not found, "reasons": [asdict(reason) for reason in found], "except": lacking}
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
        """Answers once a sink (default: all) holds everything up to an LSN; 504 after the timeout. What the answer does
        not cover is named in both cases."""
        try:
            wanted = parse_lsn(request.query_params["lsn"])
            timeout = min(float(request.query_params.get("timeout", "10")), LONGEST_WAIT)
            if math.isnan(timeout):
                raise ValueError
        except (KeyError, ValueError):
            return JSONResponse({"error": "give lsn=16/B374D848, and timeout in seconds"}, 400)
        try:
            asked = self._asked(request)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 404)
        return await self._waited(wanted, asked, time.monotonic() + timeout)

    def _asked(self, request: Request) -> Asked:
        """Raises ConfigError for a sink or a table that the pipeline does not have."""
        query = request.query_params
        sinks = tuple(dict.fromkeys(query.getlist("sink"))) or self.observer.sinks
        unknown = [name for name in sinks if name not in self.observer.sinks]
        if unknown:
            raise ConfigError(f"No sink is called {unknown[0]}. Sinks: {', '.join(self.observer.sinks)}.")
        tables = frozenset(_table(name) for name in query.getlist("table"))
        known = {str(table.name) for table in self.observer.settings.source.tables}
        if unknown := sorted(tables - known):
            raise ConfigError(f"No table is called {unknown[0]}. Tables: {', '.join(sorted(known))}.")
        return Asked(sinks, tables, query.get("except_waiting", "").lower() in ("1", "true", "yes"))

    async def _waited(self, wanted: Lsn, asked: Asked, deadline: float) -> Response:
        with self.observer.hurried():
            while True:
                moved = self._moved  # taken before the look: a move in between is not missed
                standing = self.observer.seen.standing
                behind = standing.behind(wanted, asked)
                left = deadline - time.monotonic()
                if not behind or left <= 0:
                    lacking = _listed(standing.excepted(asked))
                    body = {"reached": not behind, "lsn": format_lsn(wanted), "except": lacking}
                    return JSONResponse(body) if not behind else JSONResponse({**body, "behind": behind}, 504)
                try:
                    await asyncio.wait_for(moved.wait(), left)
                except TimeoutError:
                    continue

    async def cut(self, request: Request) -> Response:
        """The newest LSN that every sink has reached, and what it does not cover."""
        try:
            asked = self._asked(request)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 404)
        seen = self.observer.seen
        places = [seen.places.get(name, NOWHERE) for name in asked.sinks]
        lowest = min((place.of(asked.tables, asked.except_waiting) for place in places), default=ZERO_LSN)
        return JSONResponse({"lsn": format_lsn(lowest), "except": _listed(seen.standing.excepted(asked))})

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

    def _story(self, table: str, key: str) -> RowHistory:
        observer = self.observer
        places = observer.seen.places
        return story(observer.settings, observer.reader, places, table, key, seconds=_LONGEST_SEARCH)

    async def letters(self, request: Request) -> Response:
        """The parked changes."""
        return await self._control.letters(request)

    async def retry(self, request: Request) -> Response:
        """Try parked changes again."""
        return await self._control.retry(request)

    async def pause(self, request: Request) -> Response:
        """Let a sink or a table stand still."""
        return await self._control.pause(request)

    async def skip(self, request: Request) -> Response:
        """Have a sink go on without a table."""
        return await self._control.skip(request)

    async def resume(self, request: Request) -> Response:
        """Let it go on."""
        return await self._control.resume(request)

    async def description(self, _: Request) -> Response:
        """The API's own description."""
        return JSONResponse(openapi.document())


def _listed(found: list[Excepted]) -> list[dict[str, object]]:
    return [asdict(item) for item in found]


def _table(name: str) -> str:
    """As the pipeline writes it; a name that is none is left as it is, and not found."""
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

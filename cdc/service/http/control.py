"""The requests that change something: pause, resume, skip, retry dead letters. They write to the state folder, like the
commands of the same names, and open no store."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from cdc.config.settings import Settings
from cdc.errors import ConfigError, MillraceError
from cdc.model import Lsn, format_lsn, parse_lsn
from cdc.service.inspect.verification import chosen_sinks
from cdc.service.observe.observer import Observer
from cdc.service.state import pauses
from sinks.apply.dead_letters import DeadLetter, DeadLetters

_BODY_SECONDS = 5.0
MOST_DEAD_LETTERS = 200


class Control:
    """The routes that change something, and the list of dead letters."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def pause(self, request: Request) -> Response:
        """Pause a sink or a table."""
        return await _answer(request, lambda body: self._change(body, pauses.pause))

    async def skip(self, request: Request) -> Response:
        """Have a sink skip a table."""
        return await _answer(request, self._skip)

    async def resume(self, request: Request) -> Response:
        """Resume a sink or a table."""
        return await _answer(request, self._resume)

    async def retry(self, request: Request) -> Response:
        """Have the running pipeline retry dead letters."""
        return await _answer(request, self._retry)

    async def dead_letters(self, request: Request) -> Response:
        """The newest dead letters: sink, table, LSN, reason and time, never a row's key or values."""
        sink = request.query_params.getlist("sink")
        try:
            found = await asyncio.to_thread(lambda: list(self._list(sink)))
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 404)
        newest = sorted(found, key=lambda one: str(one["parked_at"]), reverse=True)
        return JSONResponse({"total": len(found), "letters": newest[:MOST_DEAD_LETTERS]})

    def _change(self, body: Mapping[str, str], change: Callable[[Settings, str], pauses.Paused]) -> dict[str, object]:
        if "target" not in body:
            raise ConfigError('Name a target: {"target": "redis"} or {"target": "public.orders"}.')
        return {"paused": change(self._observer.settings, body["target"]).facts()}

    def _resume(self, body: Mapping[str, str]) -> dict[str, object]:
        return self._change(body, lambda settings, target: pauses.resume(settings, target, body.get("sink", "")))

    def _skip(self, body: Mapping[str, str]) -> dict[str, object]:
        if "sink" not in body:
            raise ConfigError('Name a sink: {"target": "public.orders", "sink": "delta"}.')
        return self._change(body, lambda settings, target: pauses.skip(settings, target, body["sink"]))

    def _retry(self, body: Mapping[str, str]) -> dict[str, object]:
        table, lsn = body.get("table"), body.get("lsn")
        files = self._files([body["sink"]] if "sink" in body else [])
        if lsn is None:
            return {"asked": sum(file.ask_retry(table) for _, file in files)}
        wanted = _lsn(lsn)
        chosen = [(file, one) for _, file in files for one in file.list(table) if one.version == wanted]
        return {"asked": sum(file.ask_retry(one.table, one.key) for file, one in chosen)}

    def _list(self, sinks: list[str]) -> Iterator[dict[str, object]]:
        for name, file in self._files(sinks):
            yield from (_facts(name, dead_letter) for dead_letter in file.list())

    def _files(self, sinks: list[str]) -> Iterator[tuple[str, DeadLetters]]:
        settings = self._observer.settings
        for sink in chosen_sinks(settings, sinks):
            yield sink.name, DeadLetters(settings.state / "dead-letters" / sink.name)


def _lsn(text: str) -> Lsn:
    try:
        return parse_lsn(text)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None


def _facts(sink: str, dead_letter: DeadLetter) -> dict[str, object]:
    return {
        "sink": sink,
        "table": dead_letter.table,
        "lsn": format_lsn(Lsn(dead_letter.version)),
        "reason": dead_letter.reason,
        "attempts": dead_letter.attempts,
        "parked_at": dead_letter.parked_at.isoformat(timespec="seconds"),
    }


async def _answer(request: Request, act: Callable[[Mapping[str, str]], dict[str, object]]) -> Response:
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            body = _parsed(await request.body())
        return JSONResponse(await asyncio.to_thread(act, body))
    except (TimeoutError, ClientDisconnect):
        return JSONResponse({"error": "the body did not arrive in time"}, 408)
    except ConfigError as error:
        return JSONResponse({"error": str(error)}, 400)
    except MillraceError as error:
        return JSONResponse({"error": str(error)}, 503)


def _parsed(body: bytes) -> Mapping[str, str]:
    try:
        found = json.loads(body or b"{}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError("The body must be a JSON object whose values are strings.")
    return found

"""What may be changed through the endpoint: pausing, resuming, trying dead letters again. Works on the state folder,
like the commands of the same names; opens no store."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from cdc.config.settings import Settings
from cdc.errors import ConfigError, MillraceError
from cdc.model import Lsn, format_lsn, parse_lsn
from cdc.service.inspect.verification import chosen_sinks
from cdc.service.state import pauses
from sinks.apply.dead_letters import DeadLetter, DeadLetters

_BODY_SECONDS = 5.0
MOST_LETTERS = 200


class SettingsHolder(Protocol):
    """Whoever knows the present settings."""

    settings: Settings


class Control:
    """The routes that change something, and the list that they work on."""

    def __init__(self, followed: SettingsHolder) -> None:
        self._followed = followed

    async def pause(self, request: Request) -> Response:
        """Let a sink or a table stand still."""
        return await _answered(request, lambda asked: self._paused(asked, pauses.pause))

    async def skip(self, request: Request) -> Response:
        """Have a sink go on without a table."""
        return await _answered(request, self._skipped)

    async def resume(self, request: Request) -> Response:
        """Let it go on."""
        return await _answered(request, self._resumed)

    async def retry(self, request: Request) -> Response:
        """Have parked changes tried again by the running pipeline."""
        return await _answered(request, self._retried)

    async def letters(self, request: Request) -> Response:
        """The newest parked changes: where, when and why, never a row's key or values."""
        sink = request.query_params.getlist("sink")
        try:
            found = await asyncio.to_thread(lambda: list(self._listed(sink)))
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 404)
        newest = sorted(found, key=lambda one: str(one["parked_at"]), reverse=True)
        return JSONResponse({"total": len(found), "letters": newest[:MOST_LETTERS]})

    def _paused(self, asked: Mapping[str, str], change: Callable[[Settings, str], pauses.Paused]) -> dict[str, object]:
        if "target" not in asked:
            raise ConfigError('Say what: {"target": "redis"} or {"target": "public.orders"}.')
        return {"paused": change(self._followed.settings, asked["target"]).facts()}

    def _resumed(self, asked: Mapping[str, str]) -> dict[str, object]:
        return self._paused(asked, lambda settings, target: pauses.resume(settings, target, asked.get("sink", "")))

    def _skipped(self, asked: Mapping[str, str]) -> dict[str, object]:
        if "sink" not in asked:
            raise ConfigError('Say where: {"target": "public.orders", "sink": "delta"}.')
        return self._paused(asked, lambda settings, target: pauses.skip(settings, target, asked["sink"]))

    def _retried(self, asked: Mapping[str, str]) -> dict[str, object]:
        table, lsn = asked.get("table"), asked.get("lsn")
        boxes = self._boxes([asked["sink"]] if "sink" in asked else [])
        if lsn is None:
            return {"asked": sum(box.ask_retry(table) for _, box in boxes)}
        wanted = _lsn(lsn)
        chosen = [(box, one) for _, box in boxes for one in box.list(table) if one.version == wanted]
        return {"asked": sum(box.ask_retry(one.table, one.key) for box, one in chosen)}

    def _listed(self, sinks: list[str]) -> Iterator[dict[str, object]]:
        for name, box in self._boxes(sinks):
            yield from (_shown(name, letter) for letter in box.list())

    def _boxes(self, sinks: list[str]) -> Iterator[tuple[str, DeadLetters]]:
        settings = self._followed.settings
        for sink in chosen_sinks(settings, sinks):
            yield sink.name, DeadLetters(settings.state / "dead-letters" / sink.name)


def _lsn(text: str) -> Lsn:
    try:
        return parse_lsn(text)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None


def _shown(sink: str, letter: DeadLetter) -> dict[str, object]:
    return {
        "sink": sink,
        "table": letter.table,
        "lsn": format_lsn(Lsn(letter.version)),
        "reason": letter.reason,
        "attempts": letter.attempts,
        "parked_at": letter.parked_at.isoformat(timespec="seconds"),
    }


async def _answered(request: Request, act: Callable[[Mapping[str, str]], dict[str, object]]) -> Response:
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            asked = _asked(await request.body())
        return JSONResponse(await asyncio.to_thread(act, asked))
    except (TimeoutError, ClientDisconnect):
        return JSONResponse({"error": "the body did not arrive in time"}, 408)
    except ConfigError as error:
        return JSONResponse({"error": str(error)}, 400)
    except MillraceError as error:
        return JSONResponse({"error": str(error)}, 503)


def _asked(body: bytes) -> Mapping[str, str]:
    try:
        asked = json.loads(body or b"{}")
    except ValueError:
        asked = None
    if not isinstance(asked, dict) or not all(isinstance(value, str) for value in asked.values()):
        raise ConfigError("The body is a JSON object of texts.")
    return asked

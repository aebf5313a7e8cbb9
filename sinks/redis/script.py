"""Calls of the script that writes rows: a few hundred rows each, several calls on their way at once."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoScriptError, RedisError

from sinks.redis.keys import Names

_SCRIPT = files("sinks.redis").joinpath("apply.lua").read_bytes()
_SHA = hashlib.sha1(_SCRIPT).hexdigest()  # noqa: S324  Redis names scripts by it
_CALL_BYTES = 16 << 20  # a client's whole query is limited to 1 GB, and the server stands still during a call
_FLIGHT_BYTES = 32 << 20  # held twice, as rows and as the request
_FLIGHT_ROWS = 5000
_FLIGHTS = 2
"""Under way at once, each on a connection of its own: the next is put together while the server works on one."""


class Write(NamedTuple):
    """One row for the script; `expected` is what its version key must still hold, `sets` are by lines.

    A plain tuple: there is one for every row, and a frozen dataclass takes three times as long to make.
    """

    name: str
    version: str
    op: str
    value: bytes
    expected: bytes = b""
    sets: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """The script with what is the same for every row of a sink."""

    client: "redis.Redis"
    settings: tuple[str | int, ...]
    """Form, three lifetimes in milliseconds, channel."""
    chunk: int
    cluster: bool

    def write(self, names: Names, writes: Sequence[Write]) -> list[int]:
        """Write the rows; returns the places of those whose expectation failed. Raises RedisError, and then any of
        them may have been written."""
        flights = self._flights(names, writes)
        missed: list[int] = []
        if self.cluster or len(writes) <= _FLIGHT_ROWS:
            for flight in flights:
                missed += self._flown(names, writes, flight)
            return missed
        with ThreadPoolExecutor(_FLIGHTS, thread_name_prefix="redis-flight") as pool:
            for found in pool.map(lambda flight: self._flown(names, writes, flight), flights):
                missed += found
        return missed

    def _flown(self, names: Names, writes: Sequence[Write], flight: Sequence[Sequence[int]]) -> list[int]:
        """Send the calls of a flight; returns the places of the rows whose expectation failed."""
        calls = [self._arguments(names, [writes[place] for place in places]) for places in flight]
        missed: list[int] = []
        for places, failed in zip(flight, self._sent(calls), strict=True):
            missed += [places[place - 1] for place in failed]
        return missed

    def _sent(self, calls: Sequence[Sequence[object]]) -> Iterator[list[int]]:
        pipeline = self.client.pipeline(transaction=False)
        for arguments in calls:
            pipeline.execute_command("EVALSHA", _SHA, *arguments)  # type: ignore[no-untyped-call]
        for arguments, reply in zip(calls, pipeline.execute(raise_on_error=False), strict=True):
            if isinstance(reply, NoScriptError):  # restarted, failed over or flushed
                reply = self.client.eval(_SCRIPT.decode(), *arguments)  # type: ignore[arg-type]  # noqa: PLW2901
            if isinstance(reply, RedisError):
                raise reply
            yield list(reply)

    def _arguments(self, names: Names, rows: Sequence[Write]) -> list[object]:
        keys = [name for row in rows for name in (row.name, names.version(row.name))]
        values: list[Any] = []
        for row in rows:
            values += (row.version, row.op, row.expected, row.sets, row.value)
        return [len(keys), *keys, *self.settings, *values]

    def _flights(self, names: Names, writes: Sequence[Write]) -> Iterator[list[list[int]]]:
        """Calls that are sent together: what they hold is bounded, for the client's memory and the server's."""
        flight: list[list[int]] = []
        size = rows = 0
        for places in self._calls(names, writes):
            flight.append(places)
            rows += len(places)
            size += sum(len(writes[place].value) for place in places)
            if rows >= _FLIGHT_ROWS or size >= _FLIGHT_BYTES:
                yield flight
                flight, size, rows = [], 0, 0
        if flight:
            yield flight

    def _calls(self, names: Names, writes: Sequence[Write]) -> Iterator[list[int]]:
        for places in self._slots(names, writes):
            chunk: list[int] = []
            size = 0
            for place in places:
                chunk.append(place)
                size += len(writes[place].value)
                if len(chunk) >= self.chunk or size >= _CALL_BYTES:
                    yield chunk
                    chunk, size = [], 0
            if chunk:
                yield chunk

    def _slots(self, names: Names, writes: Sequence[Write]) -> Iterable[Sequence[int]]:
        """A call's keys must share a cluster's slot."""
        if not self.cluster or names.together:
            return [range(len(writes))]
        slots: dict[int, list[int]] = {}
        for place, write in enumerate(writes):
            slots.setdefault(names.slot(write.name), []).append(place)
        return slots.values()

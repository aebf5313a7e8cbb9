"""Calls of the script that writes rows: a few hundred rows per call, several calls per pipeline."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import redis
from redis.crc import key_slot
from redis.exceptions import NoScriptError, RedisError

from sinks.redis.keys import Names

_SCRIPT = files("sinks.redis").joinpath("apply.lua").read_bytes()
_SHA = hashlib.sha1(_SCRIPT).hexdigest()  # noqa: S324  Redis names scripts by their SHA-1
_CALL_BYTES = 16 << 20  # Redis limits a request to 1 GB, and serves no other client during a call
_PIPELINE_BYTES = 32 << 20  # in memory twice, as rows and as the request
_PIPELINE_ROWS = 5000
_PARALLEL_PIPELINES = 2
"""Each on its own connection: the client builds one while the server executes the other."""


class Write(NamedTuple):
    """One row for the script; `expected` is the required value of its version key, `sets` has one set on each line.

    A tuple, since there is one for every row: a frozen dataclass takes three times as long to create.
    """

    name: str
    version: str
    op: str
    value: bytes
    expected: bytes = b""
    sets: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """The script with the arguments that are the same for every row of a sink."""

    client: "redis.Redis"
    settings: tuple[str | int, ...]
    """Row format, three lifetimes in milliseconds, channel."""
    chunk: int
    cluster: bool

    def write(self, names: Names, writes: Sequence[Write]) -> list[int]:
        """Write the rows; returns the indexes of those whose version key was not as `expected`, which were not written.
        Raises RedisError; then any of the rows may have been written."""
        pipelines = self._pipelines(names, writes)
        conflicts: list[int] = []
        if self.cluster or len(writes) <= _PIPELINE_ROWS:
            for calls in pipelines:
                conflicts += self._send(names, writes, calls)
            return conflicts
        with ThreadPoolExecutor(_PARALLEL_PIPELINES, thread_name_prefix="redis-write") as pool:
            for found in pool.map(lambda calls: self._send(names, writes, calls), pipelines):
                conflicts += found
        return conflicts

    def _send(self, names: Names, writes: Sequence[Write], calls: Sequence[Sequence[int]]) -> list[int]:
        """Send one pipeline; returns the indexes of the conflicts."""
        arguments = [self._arguments(names, [writes[index] for index in call]) for call in calls]
        conflicts: list[int] = []
        for call, numbers in zip(calls, self._execute(arguments), strict=True):
            conflicts += [call[number - 1] for number in numbers]
        return conflicts

    def _execute(self, calls: Sequence[Sequence[object]]) -> Iterator[list[int]]:
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

    def _pipelines(self, names: Names, writes: Sequence[Write]) -> Iterator[list[list[int]]]:
        """Calls that are sent together, limited in rows and bytes for the memory of client and server."""
        calls: list[list[int]] = []
        size = rows = 0
        for call in self._calls(names, writes):
            calls.append(call)
            rows += len(call)
            size += sum(len(writes[index].value) for index in call)
            if rows >= _PIPELINE_ROWS or size >= _PIPELINE_BYTES:
                yield calls
                calls, size, rows = [], 0, 0
        if calls:
            yield calls

    def _calls(self, names: Names, writes: Sequence[Write]) -> Iterator[list[int]]:
        """The indexes of the rows of each call."""
        for indexes in self._slots(names, writes):
            call: list[int] = []
            size = 0
            for index in indexes:
                call.append(index)
                size += len(writes[index].value)
                if len(call) >= self.chunk or size >= _CALL_BYTES:
                    yield call
                    call, size = [], 0
            if call:
                yield call

    def _slots(self, names: Names, writes: Sequence[Write]) -> Iterable[Sequence[int]]:
        """The indexes of the rows of each cluster slot: all keys of a call must be in one slot."""
        if not self.cluster or names.one_slot:
            return [range(len(writes))]
        slots: dict[int, list[int]] = {}
        for index, write in enumerate(writes):
            slots.setdefault(key_slot(write.name.encode()), []).append(index)
        return slots.values()

"""A TCP proxy that misbehaves on command: an event loop in a thread of its own, in front of any local server.

Modes: `pass_on`; `cut` (reset every connection, accept no new ones); `deaf` (connections are not accepted, nor
refused); `stall` (accepted, nothing is forwarded); `slow` (bytes per second each way); `one_way` (only one direction
is forwarded); `cut_after` (reset once so many bytes have gone one way). Directions are seen from the client:
`up` is to the server, `down` is from it.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Literal, Protocol

import pytest

Direction = Literal["up", "down"]
_CHUNK = 65536
_HOST = "127.0.0.1"


class Proxy:
    """Listens on a free port of loopback and forwards to a port of loopback. Modes count for old connections too."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.connections = 0
        self.forwarded: dict[Direction, int] = {"up": 0, "down": 0}
        self._open: set[Direction] = {"up", "down"}
        self._rate: float | None = None
        self._limit: dict[Direction, int] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._listener = self._bind(0)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self._do(self._listen())

    # -- what tests call

    def pass_on(self) -> None:
        """Forward everything; accept again."""
        self._do(self._set(_BOTH, listen=True))

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._do(self._set(_BOTH, listen=False))
        self._do(self._reset())

    def reset(self) -> None:
        """Reset every connection; new ones are welcome."""
        self._do(self._reset())

    def deaf(self) -> None:
        """New connections reach the kernel and are never accepted; old ones stall."""
        self._do(self._set(set(), listen=None))

    def stall(self) -> None:
        """Connections are accepted, and nothing is forwarded."""
        self._do(self._set(set(), listen=True))

    def one_way(self, direction: Direction) -> None:
        """Forward only in this direction."""
        self._do(self._set({direction}, listen=True))

    def slow(self, bytes_per_second: float) -> None:
        """At most so many bytes a second, each way of each connection."""
        self._do(self._set(_BOTH, listen=True, rate=bytes_per_second))

    def cut_after(self, count: int, direction: Direction) -> None:
        """Forward exactly so many more bytes that way, then reset every connection. New ones then pass."""
        self._do(self._set(_BOTH, listen=True, limit={direction: count}))

    def close(self) -> None:
        """Let go of everything."""
        self._do(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # -- inside the loop

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    @staticmethod
    def _bind(port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        listener.listen(64)
        listener.setblocking(False)
        return listener

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._listener)

    async def _set(
        self,
        open_ways: set[Direction],
        listen: bool | None,
        rate: float | None = None,
        limit: dict[Direction, int] | None = None,
    ) -> None:
        """`listen`: True accepts, False refuses, None keeps the port but accepts nothing."""
        self._open, self._rate, self._limit = set(open_ways), rate, dict(limit or {})
        self._changed.set()
        self._changed = asyncio.Event()
        if self._server is not None:
            self._server.close()
            self._server = None
        if listen is not True:
            self._listener.close()
        if listen is None:
            self._listener = self._bind(self.port)
        elif listen:
            self._listener.close()
            self._listener = self._bind(self.port)
            await self._listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            up_reader, up_writer = await asyncio.open_connection(_HOST, self.target)
        except OSError:
            _abort(writer)
            return
        self._writers |= {writer, up_writer}
        ways = (self._pump("up", reader, up_writer), self._pump("down", up_reader, writer))
        tasks = {asyncio.ensure_future(way) for way in ways}
        self._tasks |= tasks
        await asyncio.wait(tasks)
        self._tasks -= tasks
        for each in (writer, up_writer):
            each.close()
        self._writers -= {writer, up_writer}

    async def _pump(self, way: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                while data := await reader.read(self._portion()):
                    while way not in self._open:
                        await self._changed.wait()
                    await self._forward(way, data, writer)
            except ConnectionResetError:  # a killed process resets: the other side must see it too
                if way in self._open:
                    _abort(writer)
                raise
            if writer.can_write_eof():
                writer.write_eof()

    def _portion(self) -> int:
        return _CHUNK if self._rate is None else max(1, min(_CHUNK, int(self._rate / 10)))

    async def _forward(self, way: Direction, data: bytes, writer: asyncio.StreamWriter) -> None:
        allowed = self._limit.get(way)
        part = data if allowed is None else data[:allowed]
        self.forwarded[way] += len(part)
        if allowed is not None:
            self._limit[way] = allowed - len(part)
        writer.write(part)
        await writer.drain()
        if allowed is not None and self._limit.get(way) == 0:
            self._limit = {}
            await self._reset()
        elif self._rate is not None:
            await asyncio.sleep(len(part) / self._rate)

    async def _reset(self) -> None:
        for writer in list(self._writers):
            _abort(writer)
        self._writers.clear()

    async def _finish(self) -> None:
        if self._server is not None:
            self._server.close()
        self._listener.close()
        await self._reset()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)


_BOTH: set[Direction] = {"up", "down"}


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with RST: linger of zero seconds."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class MakeProxy(Protocol):
    """A proxy in front of a port of loopback."""

    def __call__(self, target: int) -> Proxy: ...


@pytest.fixture
def proxy() -> Iterator[MakeProxy]:
    """Makes proxies that end with the test: `proxy(postgres_server.port).port` is where to connect."""
    made: list[Proxy] = []

    def make(target: int) -> Proxy:
        made.append(Proxy(target))
        return made[-1]

    yield make
    for each in made:
        each.close()

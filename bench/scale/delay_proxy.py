"""A TCP proxy that adds a fixed time to every request: `python -m bench.scale.delay_proxy PORT SECONDS STORE`.

It stands for a store that takes so long to answer. It limits no rate: requests of several connections wait side by
side, those of one connection one after the other, also commands that a Redis client sends in one piece. Prints the port
on which it listens; ends with its parent's pipe.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

_HOST = "127.0.0.1"
_CHUNK = 1 << 16
Requests = Callable[[asyncio.StreamReader], AsyncIterator[bytes]]


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """What has arrived. An HTTP client waits for its answer, so a piece is a request, or a part of a large one."""
    while data := await reader.read(_CHUNK):
        yield data


async def _commands(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The commands of a Redis client: `*<count>`, then `$<length>` and the bytes of each argument."""
    while head := await reader.readline():
        parts = [head]
        for _ in range(int(head[1:])):
            size = await reader.readline()
            parts += [size, await reader.readexactly(int(size[1:]) + 2)]
        yield b"".join(parts)


async def _forward(requests: AsyncIterator[bytes], writer: asyncio.StreamWriter, seconds: float) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        async for request in requests:
            if seconds:
                await asyncio.sleep(seconds)
            writer.write(request)
            await writer.drain()
    writer.close()


async def _serve(port: int, seconds: float, requests: Requests) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(_HOST, port)
        await asyncio.gather(_forward(requests(reader), up_writer, seconds), _forward(_pieces(up_reader), writer, 0.0))

    server = await asyncio.start_server(connected, _HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextlib.contextmanager
def delayed(store: str, port: int, seconds: float) -> Iterator[int]:
    """The port of a proxy in a process of its own, in front of a store of this machine."""
    command = [sys.executable, "-m", "bench.scale.delay_proxy", str(port), str(seconds), store]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]), _commands if sys.argv[3] == "redis" else _pieces))

"""A TCP proxy that adds a fixed time to every request: `python -m bench.scale.delay_proxy PORT SECONDS STORE`.

It stands for a store that takes so long to answer. It limits no rate: requests of several connections wait side by
side, those of one connection one after the other, also commands that a Redis client sends in one piece. A request is
passed on whole, after its time. Prints the port on which it listens; ends with its parent's pipe.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

_HOST = "127.0.0.1"
_CHUNK = 1 << 18
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
RequestEnd = Callable[[bytearray], int]
"""The length of the first request in what has arrived; 0: it is not complete."""


def redis_command(arrived: bytearray) -> int:
    """A command of a Redis client: `*<count>`, then `$<length>` and the bytes of each argument."""
    at = arrived.find(b"\r\n")
    if at < 0:
        return 0
    end = at + 2
    for _ in range(int(arrived[1:at])):
        at = arrived.find(b"\r\n", end)
        if at < 0:
            return 0
        end = at + 4 + int(arrived[end + 1 : at])
    return end if end <= len(arrived) else 0


def http_request(arrived: bytearray) -> int:
    """A request with its headers and the body that `content-length` announces."""
    at = arrived.find(b"\r\n\r\n")
    if at < 0:
        return 0
    length = _LENGTH.search(arrived, 0, at)
    end = at + 4 + (int(length[1]) if length else 0)
    return end if end <= len(arrived) else 0


async def _delay(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request_end: RequestEnd, seconds: float
) -> None:
    arrived = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            arrived += data
            while end := request_end(arrived):
                await asyncio.sleep(seconds)
                writer.write(arrived[:end])
                del arrived[:end]
                await writer.drain()
    writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(port: int, seconds: float, request_end: RequestEnd) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(_HOST, port)
        await asyncio.gather(_delay(reader, up_writer, request_end, seconds), _forward(up_reader, writer))

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
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]), redis_command if sys.argv[3] == "redis" else http_request))

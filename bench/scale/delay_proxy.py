"""A TCP proxy that delivers every request later by a fixed time: `python -m bench.scale.delay_proxy PORT SECONDS`.

It stands for a store on another machine. It limits no rate: requests of several connections wait side by side. Prints
the port on which it listens; ends with its parent's pipe.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

_HOST = "127.0.0.1"
_CHUNK = 1 << 16


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(due - loop.time(), 0))
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    delivering = asyncio.create_task(deliver())
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            queue.put_nowait((loop.time() + seconds, data))
    queue.put_nowait((loop.time(), b""))
    with contextlib.suppress(ConnectionError):
        await delivering


async def _serve(port: int, seconds: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(_HOST, port)
        await asyncio.gather(_forward(reader, up_writer, seconds), _forward(up_reader, writer, 0.0))

    server = await asyncio.start_server(connected, _HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextlib.contextmanager
def delayed(port: int, seconds: float) -> Iterator[int]:
    """The port of a proxy in a process of its own, in front of a port of this machine."""
    command = [sys.executable, "-m", "bench.scale.delay_proxy", str(port), str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))

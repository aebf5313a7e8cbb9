"""The replication connection: it receives frames and sends confirmations.

Only the reading thread may call anything here but `wake`. Nothing is decoded: a frame is the CopyData payload as
Postgres sent it (`w`, start, end, time, message). `get_copy_data` is always called in its asynchronous form: the other
one keeps the GIL while it waits.
"""

import os
import select
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq

from cdc.capture.source.connect import explain_result
from cdc.errors import SourceError, SourceLost
from cdc.model import ZERO_LSN, Lsn, format_lsn
from cdc.ports import Clock

_POSTGRES_EPOCH = 946_684_800
_FEEDBACK = struct.Struct("!cQQQqc")
_KEEPALIVE = struct.Struct("!cQqB")
_STOP_SECONDS = 2.0
_STRIDE = range(64)
"""Limits are checked once per this many messages: no other loop runs as often."""

Frame = bytes | memoryview
Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Received:
    """What one `drain` received. `server_end` is the newest keepalive's LSN: everything that commits at or below it was
    sent before it. `reply`: the server asked for a status message."""

    frames: list[Frame]
    size: int
    server_end: Lsn = ZERO_LSN
    reply: bool = False


def protocol(server_version: int) -> dict[str, str]:
    """pgoutput's options for this server: its newest protocol, streaming of open transactions, logical messages.

    `two_phase` is never set: a prepared transaction then arrives complete at COMMIT PREPARED, or never if it is rolled
    back.
    """
    version = 2 if server_version < 150_000 else 3 if server_version < 160_000 else 4
    return {"proto_version": str(version), "streaming": "on", "messages": "true"}


class ReplicationConnection:
    """Logical replication over one connection, from `start` until `stop` or an error.

    A server that sends nothing for `silence` seconds, although a reply was requested, raises SourceLost: a network that
    drops packets closes no connection. Time in which `drain` is not called does not count.
    """

    def __init__(self, connection: Connection, clock: Clock, silence: float = 20.0) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._clock = clock
        self._silence = silence
        self._status_seconds = min(5.0, silence / 4)
        self._last_received = self._last_sent = clock.monotonic()
        self._reply_requested = False
        self._confirmed = ZERO_LSN
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def start(self, slot: str, publication: str, after: Lsn) -> None:
        """Begin streaming what commits after an LSN.

        The trap: Postgres silently starts at the slot's own LSN if this one is smaller, and silently skips to it if it
        is greater. `cdc.capture.source.slot.check` compares them first.
        """
        options = {**protocol(self._pg.server_version), "publication_names": _quoted(publication, '"')}
        listed = ", ".join(f"{name} {_quoted(value, chr(39))}" for name, value in options.items())
        query = f"START_REPLICATION SLOT {_quoted(slot, chr(34))} LOGICAL {format_lsn(after)} ({listed})"
        self._pg.nonblocking = 1
        result = run_command(self._pg, query, self._check_timeout)
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise explain_result(result, f"Reading slot {slot}")
        self._confirmed = after
        self._last_received = self._clock.monotonic()

    def drain(self, max_messages: int, max_bytes: int, wait: float) -> Received:
        """Receive what has arrived, up to the limits; wait at most `wait` seconds for it, or until `wake`."""
        drained = self._receive(max_messages, max_bytes)
        if not drained.frames and not drained.server_end:
            if self._wait([self._pg.socket], wait):
                self._note_received()
            drained = self._receive(max_messages, max_bytes)
        if drained.frames or drained.server_end:
            self._note_received()
        else:
            self._check_silence()
        return drained

    def pause(self, wait: float) -> None:
        """Receive nothing for up to `wait` seconds, or until `wake`; status messages are still sent."""
        self._wait([], wait)
        self._note_received()
        self.confirm(self._confirmed)

    def confirm(self, lsn: Lsn, answer: bool = False) -> None:
        """Tell the server which LSN is durable. Never goes back; repeated often enough to prevent a timeout."""
        now = self._clock.monotonic()
        if lsn <= self._confirmed and not answer and now - self._last_sent < self._status_seconds:
            return
        self._confirmed = max(self._confirmed, lsn)
        self._send_status(ask=False)

    def wake(self) -> None:
        """End a wait of the reading thread. The only method for other threads."""
        with suppress(OSError):  # a full pipe wakes it too; a closed one has no reader
            os.write(self._wake_write, b"\0")

    def stop(self) -> None:
        """End the stream so that the server frees the slot at once; then close."""
        try:
            self._pg.put_copy_end()
            deadline = self._clock.monotonic() + _STOP_SECONDS
            while self._clock.monotonic() < deadline and self._pg.get_copy_data(1)[0] >= 0:
                self._pg.flush()
                self._wait([self._pg.socket], 0.1)
                self._pg.consume_input()
        except psycopg.Error:
            pass  # the connection is closed in any case
        finally:
            self.close()

    def close(self) -> None:
        """Drop the connection."""
        self._connection.close()
        for end in (self._wake_read, self._wake_write):
            with suppress(OSError):
                os.close(end)
        self._wake_read = self._wake_write = -1

    def _receive(self, max_messages: int, max_bytes: int) -> Received:
        frames: list[Frame] = []
        get, append = self._pg.get_copy_data, frames.append
        size, seen, server_end, reply, dry = 0, 0, ZERO_LSN, False, False
        try:
            while size < max_bytes and len(frames) < max_messages:
                for _ in _STRIDE:
                    length, data = get(1)
                    if length <= _KEEPALIVE.size:
                        break
                    append(data)
                    size += length
                    if size >= max_bytes:
                        break
                if length > _KEEPALIVE.size:
                    continue
                if length > 0:
                    _, end, _, asked = _KEEPALIVE.unpack(data)
                    server_end, reply, dry = Lsn(end), reply or bool(asked), False
                elif length < 0:
                    if not frames:
                        raise self._end_error()
                    break  # the next call finds the end again
                elif dry and len(frames) == seen:
                    break  # consume_input, which also reads what TLS buffers unseen by select, gave nothing
                else:
                    self._pg.consume_input()
                    dry, seen = True, len(frames)
        except psycopg.Error:
            if not frames:
                raise self._end_error() from None
        return Received(frames, size, server_end, reply)

    def _end_error(self) -> SourceError:
        with suppress(psycopg.Error):
            result = self._pg.get_result()
            if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
                return explain_result(result, "Streaming")
        return SourceLost("The connection to the source ended.", "It is retried automatically.")

    def _wait(self, sockets: list[int], seconds: float) -> bool:
        """Whether one of the sockets is readable."""
        ready, _, _ = select.select([*sockets, self._wake_read], [], [], seconds)
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        return any(socket in ready for socket in sockets)

    def _note_received(self) -> None:
        self._last_received, self._reply_requested = self._clock.monotonic(), False

    def _check_silence(self) -> None:
        quiet = self._clock.monotonic() - self._last_received
        if quiet >= self._silence:
            self._check_timeout(quiet)
        if quiet >= self._silence / 2 and not self._reply_requested:
            self._reply_requested = True
            self._send_status(ask=True)

    def _check_timeout(self, quiet: float) -> None:
        if quiet >= self._silence:
            raise SourceLost(f"The source has not answered for {quiet:.0f} seconds.", "It is retried automatically.")

    def _send_status(self, ask: bool) -> None:
        now = int((self._clock.now().timestamp() - _POSTGRES_EPOCH) * 1_000_000)
        at = self._confirmed
        try:
            self._pg.put_copy_data(_FEEDBACK.pack(b"r", at, at, at, now, b"\1" if ask else b"\0"))
            self._pg.flush()
        except psycopg.Error:
            raise self._end_error() from None
        self._last_sent = self._clock.monotonic()


def run_command(pg: pq.abc.PGconn, query: str, waiting: Callable[[float], None]) -> pq.abc.PGresult:
    """Run one replication command; `waiting(seconds elapsed)` is called about twice a second and may raise."""
    try:
        pg.send_query(query.encode())
        begun = time.monotonic()
        while pg.flush() or pg.is_busy():
            select.select([pg.socket], [], [], 0.5)
            pg.consume_input()
            waiting(time.monotonic() - begun)
        result = pg.get_result()
        if result is None:
            raise SourceLost("The source did not answer a command.", "It is retried automatically.")
        if result.status != pq.ExecStatus.COPY_BOTH:
            while pg.get_result() is not None:
                pass
    except psycopg.OperationalError:
        raise SourceLost("The connection to the source ended.", "It is retried automatically.") from None
    return result


def _quoted(text: str, quote: str) -> str:
    return quote + text.replace(quote, quote * 2) + quote

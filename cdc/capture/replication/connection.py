"""The one replication socket: frames out, confirmations in.

Only the thread that drains may call anything here but `wake`. Nothing is decoded: a frame is the CopyData payload
as Postgres sent it (`w`, start, end, time, message). `get_copy_data` is only ever called in its asynchronous form:
the other one holds the GIL while it waits.
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
"""Limits are looked at once per so many messages: the loop over them is the hottest of all."""

Frame = bytes | memoryview
Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Received:
    """What one `drain` took off the socket. `server_end` is the newest keepalive's LSN: everything that commits at
    or below it came before it. `reply` says that the server waits for an answer."""

    frames: list[Frame]
    size: int
    server_end: Lsn = ZERO_LSN
    reply: bool = False


def protocol(server_version: int) -> dict[str, str]:
    """pgoutput's options for this server: the newest protocol it knows, open transactions streamed, our messages sent.

    `two_phase` is never asked for: a prepared transaction then arrives whole at COMMIT PREPARED, and a rolled back
    one never.
    """
    version = 2 if server_version < 150_000 else 3 if server_version < 160_000 else 4
    return {"proto_version": str(version), "streaming": "on", "messages": "true"}


class ReplicationConnection:
    """Logical replication over one connection, from `start` until `stop` or an error.

    A peer that stays silent for `silence` seconds although it was asked to answer raises SourceLost: a black hole
    sends no FIN. Time during which nobody drains is not held against the server.
    """

    def __init__(self, connection: Connection, clock: Clock, silence: float = 20.0) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._clock = clock
        self._silence = silence
        self._status_seconds = min(5.0, silence / 4)
        self._heard = self._told = clock.monotonic()
        self._asked = False
        self._confirmed = ZERO_LSN
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def start(self, slot: str, publication: str, after: Lsn) -> None:
        """Begin streaming what commits after an LSN.

        The trap: Postgres takes an LSN behind the slot's for the slot's, and one ahead of it as it is, both
        without a word. `cdc.capture.source.slot.check` compares them first.
        """
        options = {**protocol(self._pg.server_version), "publication_names": _quoted(publication, '"')}
        listed = ", ".join(f"{name} {_quoted(value, chr(39))}" for name, value in options.items())
        query = f"START_REPLICATION SLOT {_quoted(slot, chr(34))} LOGICAL {format_lsn(after)} ({listed})"
        self._pg.nonblocking = 1
        result = run_command(self._pg, query, self._give_up)
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise explain_result(result, f"Reading slot {slot}")
        self._confirmed = after
        self._heard = self._clock.monotonic()

    def drain(self, max_messages: int, max_bytes: int, wait: float) -> Received:
        """Take what has arrived, up to a limit; wait for something at most `wait` seconds, or until `wake`."""
        drained = self._take(max_messages, max_bytes)
        if not drained.frames and not drained.server_end:
            if self._wait([self._pg.socket], wait):
                self._listened()
            drained = self._take(max_messages, max_bytes)
        if drained.frames or drained.server_end:
            self._listened()
        else:
            self._check_silence()
        return drained

    def hold(self, wait: float) -> None:
        """Leave the data in the socket for up to `wait` seconds, or until `wake`; the server still hears from us."""
        self._wait([], wait)
        self._listened()
        self.confirm(self._confirmed)

    def confirm(self, lsn: Lsn, answer: bool = False) -> None:
        """Tell the server what is durable. Never goes back; repeats itself often enough to be known to live."""
        now = self._clock.monotonic()
        if lsn <= self._confirmed and not answer and now - self._told < self._status_seconds:
            return
        self._confirmed = max(self._confirmed, lsn)
        self._send_status(ask=False)

    def wake(self) -> None:
        """End a wait of the draining thread. The one method for other threads."""
        with suppress(OSError):  # full: it will wake anyway; closed: nobody waits
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
            pass  # the connection is given up either way
        finally:
            self.close()

    def close(self) -> None:
        """Drop the connection."""
        self._connection.close()
        for end in (self._wake_read, self._wake_write):
            with suppress(OSError):
                os.close(end)
        self._wake_read = self._wake_write = -1

    def _take(self, max_messages: int, max_bytes: int) -> Received:
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
                        raise self._ending()
                    break  # the next call finds the end again
                elif dry and len(frames) == seen:
                    break  # the socket was asked since and gave no whole message: TLS may hide what poll cannot see
                else:
                    self._pg.consume_input()
                    dry, seen = True, len(frames)
        except psycopg.Error:
            if not frames:
                raise self._ending() from None
        return Received(frames, size, server_end, reply)

    def _ending(self) -> SourceError:
        with suppress(psycopg.Error):
            result = self._pg.get_result()
            if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
                return explain_result(result, "Streaming")
        return SourceLost("The connection to the source ended.", "It is tried again.")

    def _wait(self, sockets: list[int], seconds: float) -> bool:
        """True if one of the sockets can be read."""
        ready, _, _ = select.select([*sockets, self._wake_read], [], [], seconds)
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        return any(socket in ready for socket in sockets)

    def _listened(self) -> None:
        self._heard, self._asked = self._clock.monotonic(), False

    def _check_silence(self) -> None:
        quiet = self._clock.monotonic() - self._heard
        if quiet >= self._silence:
            self._give_up(quiet)
        if quiet >= self._silence / 2 and not self._asked:
            self._asked = True
            self._send_status(ask=True)

    def _give_up(self, quiet: float) -> None:
        if quiet >= self._silence:
            raise SourceLost(f"The source has not answered for {quiet:.0f} seconds.", "It is tried again.")

    def _send_status(self, ask: bool) -> None:
        now = int((self._clock.now().timestamp() - _POSTGRES_EPOCH) * 1_000_000)
        at = self._confirmed
        try:
            self._pg.put_copy_data(_FEEDBACK.pack(b"r", at, at, at, now, b"\1" if ask else b"\0"))
            self._pg.flush()
        except psycopg.Error:
            raise self._ending() from None
        self._told = self._clock.monotonic()


def run_command(pg: pq.abc.PGconn, query: str, waiting: Callable[[float], None]) -> pq.abc.PGresult:
    """Run one replication command; `waiting(seconds so far)` is called about twice a second and may raise."""
    try:
        pg.send_query(query.encode())
        begun = time.monotonic()
        while pg.flush() or pg.is_busy():
            select.select([pg.socket], [], [], 0.5)
            pg.consume_input()
            waiting(time.monotonic() - begun)
        result = pg.get_result()
        if result is None:
            raise SourceLost("The source gave no answer to a command.", "It is tried again.")
        if result.status != pq.ExecStatus.COPY_BOTH:
            while pg.get_result() is not None:
                pass
    except psycopg.OperationalError:
        raise SourceLost("The connection to the source ended.", "It is tried again.") from None
    return result


def _quoted(text: str, quote: str) -> str:
    return quote + text.replace(quote, quote * 2) + quote

"""Closes a connection that sends no complete request headers in time. Uvicorn itself waits for ever."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""For complete headers, counted from the connection or the last response: one byte a second does not keep it open."""


class TimeLimitedProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for each request's headers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: start the deadline."""
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Complete headers end the deadline; a part of them does not extend it."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._start_deadline()
        else:
            self._end_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected."""
        self._end_deadline()
        super().connection_lost(exc)

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._abort_if_idle)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abort_if_idle(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()

"""Whether the source answers this machine: one small query a second, over one connection."""

import threading
import time
from contextlib import closing

from cdc.capture.source.connect import connect, cut_after, explained
from cdc.config.settings import SourceSettings
from cdc.errors import SourceError

_EVERY = 1.0
_ANSWER_SECONDS = 3.0
"""A server that is this slow counts as away until it answers."""


class SourceProbe:
    """Asks in a thread of its own from `start` on."""

    def __init__(self, source: SourceSettings) -> None:
        self._source = source
        self._answered: float | None = None
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._since = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ask no more. Does not wait: a connection attempt may last some seconds."""
        self._stop.set()

    @property
    def silent_for(self) -> float:
        """Seconds since the source last answered, or since the first question."""
        return time.monotonic() - (self._since if self._answered is None else self._answered)

    @property
    def answers(self) -> bool:
        """Whether it has answered within the time that one question may take."""
        return self._answered is not None and self.silent_for < _ANSWER_SECONDS

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with closing(connect(self._source, "millrace probe")) as connection:
                    while True:
                        with cut_after(connection, _ANSWER_SECONDS), explained("Asking the source"):
                            connection.execute("select 1")
                        self._answered = time.monotonic()
                        if self._stop.wait(_EVERY):
                            return
            except SourceError:
                self._stop.wait(_EVERY)

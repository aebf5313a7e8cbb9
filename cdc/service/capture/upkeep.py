"""Periodic maintenance of the log (merging, retention) while the stream runs."""

import logging
import threading
from typing import Self

from cdc.errors import MillraceError
from cdc.ports import LogWriter

_EVERY = 10.0

_log = logging.getLogger(__name__)


class Upkeep:
    """Calls `maintain` in a thread while the block runs. Failures are retried."""

    def __init__(self, log: LogWriter, every: float = _EVERY) -> None:
        self._log = log
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._log.maintain()
            except MillraceError as error:
                _log.warning("Maintenance of the log failed and is retried: %s", error)
            except Exception:
                _log.exception("Maintenance of the log failed unexpectedly and is retried")

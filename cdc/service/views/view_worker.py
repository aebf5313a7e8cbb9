"""One view at work, in a thread of its own: opened, stepped, and opened again after a failure.

A view fails on its own: no other view and no sink waits for it.
"""

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime

from cdc import backoff
from cdc.config.settings import Settings, ViewSettings
from cdc.errors import MillraceError, ViewWaits
from cdc.ports import LogReader
from cdc.service.daemon.restarts import Attempts
from cdc.service.views.view_run import OpenView, ViewRun
from views.output_files import OutputFolder

_LONGEST_PAUSE = 0.05
_log = logging.getLogger(__name__)


class ViewWorker:
    """Runs until `end`. After an error that a retry cannot cure it waits for `resume`."""

    def __init__(self, settings: Settings, view: ViewSettings, log: LogReader, open_view: OpenView) -> None:
        self.view = view
        self._settings = settings
        self._log = log
        self._open_view = open_view
        self._stop, self._resumed = threading.Event(), threading.Event()
        self._run: ViewRun | None = None
        self._last: Mapping[str, object] = {"state": "loading"}
        self._failure: Mapping[str, object] = {}
        self._restarts = 0
        self._thread = threading.Thread(target=self._work, name=f"view-{view.name}", daemon=True)
        self._thread.start()

    def follow(self, settings: Settings) -> None:
        """Open the view with these settings the next time."""
        self._settings = settings

    def resume(self) -> None:
        """Try again now, if it has failed."""
        self._resumed.set()

    def end(self) -> None:
        """End after the present step; does not wait for it."""
        self._stop.set()
        self._resumed.set()

    def join(self, seconds: float) -> bool:
        """Wait at most so long for the end; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def facts(self) -> dict[str, object]:
        """For the status."""
        if (run := self._run) is not None:
            self._last = run.facts()
        more = {"kind": self.view.kind, "restarts": self._restarts}
        return {"state": "loading", "error": {}, **self._last, **self._failure, **more}

    def _work(self) -> None:
        attempts, ticks = Attempts(), float(getattr(self.view, "tick_seconds", 0.0))
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                OutputFolder(self._settings.state, self.view.name).ask_for_ticks(ticks)
                with closing(self._open_view(self._settings, self.view, self._log, self._stop)) as run:
                    self._step(run)
            except Exception as error:
                attempts = attempts.ended(time.monotonic() - started)
                self._fail(error, attempts.delay)
            finally:
                self._run = None

    def _step(self, run: ViewRun) -> None:
        self._run = run
        pause = least = self._log.poll_seconds
        while not self._stop.is_set():
            if run.step():
                pause = least
            else:
                self._stop.wait(pause)
                pause = max(least, min(_LONGEST_PAUSE, 1.5 * pause))
            if self._failure:
                _log.info("view %s continues", self.view.name)
                self._failure = {}

    def _fail(self, error: Exception, delay: float) -> None:
        """Show the error, and wait until it is time to try again."""
        if isinstance(error, MillraceError):
            message, remedy, final = error.message, error.remedy, not error.transient
            level = logging.INFO if isinstance(error, ViewWaits) else logging.ERROR
            _log.log(level, "view %s %s: %s", self.view.name, "waits" if level == logging.INFO else "failed", error)
        else:
            message, remedy, final = f"unexpected {type(error).__name__}", "See the log lines of views.", False
            _log.exception("view %s failed unexpectedly", self.view.name)
        if final:
            again = f"Then change its definition, or try again: millrace resume {self.view.table}"
            remedy = f"{remedy} {again}".strip()
        failed = {"message": message, "remedy": remedy, "transient": not final}
        self._failure = {"state": "failed", "error": {**failed, "at": datetime.now(UTC).isoformat(timespec="seconds")}}
        self._restarts += 1
        self._resumed.clear()
        if not self._stop.is_set():
            self._resumed.wait(None if final else backoff.spread(delay))

"""The views process: one thread per view, which reads the log and hands its output to the capture process. No JVM.

Each view has its own position in the log and fails on its own.
"""

import logging
import sys
import threading
from contextlib import suppress

import cdc.log
from cdc.config.settings import Settings
from cdc.service.daemon import footprint, process
from cdc.service.state import pauses, status
from cdc.service.views import engine
from cdc.service.views.view_workers import ViewWorkers

_INTERVAL = 0.5
_log = logging.getLogger(__name__)


def run(settings: Settings, stop: threading.Event, news: process.SettingsChange) -> None:
    """Run the views until `stop` is set, then finish the present steps."""
    workers = ViewWorkers(cdc.log.open_reader(settings), engine.open_view)
    _publish(settings, workers, "starting")
    try:
        while True:
            workers.follow(settings, pauses.read(settings.state))
            _publish(settings, workers, "running")
            if stop.wait(_INTERVAL):
                return
            settings = news() or settings
    finally:
        workers.close()
        _publish(settings, workers, "stopped")


def _publish(settings: Settings, workers: ViewWorkers, state: str) -> None:
    with suppress(OSError):  # a full disk: readers see that the file is old
        status.publish(settings.state, "views", {"state": state, "error": {}, "views": workers.facts()})


if __name__ == "__main__":
    footprint.block_import("pandas")
    footprint.collect_rarely()
    sys.exit(process.main("views", run))

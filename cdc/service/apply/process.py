"""The apply process: one Spark driver, and a streaming query per sink unless several share one.

Each sink has its own position and fails on its own. A store that is down delays only its own sink, and a failed query
is restarted after a delay. Only the loss of Spark itself ends the process; the supervisor restarts it. Spark starts in
the background: the sinks that share a query apply the log meanwhile (`direct_reader`).
"""

import logging
import sys
import threading
import time
from contextlib import suppress

import cdc.log
from cdc.config.settings import Settings
from cdc.errors import EnvironmentFault
from cdc.service.apply.driver import Driver
from cdc.service.apply.sink_workers import SinkWorkers
from cdc.service.daemon import process
from cdc.service.state import pauses, status

_log = logging.getLogger(__name__)
_INTERVAL = 0.5
_POLL_SECONDS = 0.1
_PREVIOUS_SECONDS = 60.0
"""How long to wait for the apply process of a daemon that was killed: it still finishes its batches."""


def run(settings: Settings, stop: threading.Event, news: process.SettingsChange) -> None:
    """Apply until `stop` is set, then finish the present batches."""
    driver = Driver(settings)
    workers = SinkWorkers(settings, cdc.log.open_reader(settings), driver, driver.ready)
    _start_workers(workers, stop)
    _publish(workers, "starting")
    try:
        workers.run_queries()
        while not stop.wait(_INTERVAL):
            workers.follow(news() or workers.settings, pauses.read(settings.state))
            workers.run_queries()
            _publish(workers, "running")
    finally:
        _publish(workers, "stopping")
        workers.close()
        driver.stop()
        _publish(workers, "stopped")


def _start_workers(workers: SinkWorkers, stop: threading.Event) -> None:
    """Start the sinks; waits for a previous process that is ending. Raises EnvironmentFault if it does not end."""
    deadline, told = time.monotonic() + _PREVIOUS_SECONDS, False
    while True:
        try:
            return workers.follow(workers.settings, pauses.read(workers.settings.state))
        except EnvironmentFault as error:
            if not told:
                _log.info("waiting: %s", error.message)
            told = True
            if time.monotonic() > deadline or stop.wait(_POLL_SECONDS):
                raise


def _publish(workers: SinkWorkers, state: str) -> None:
    with suppress(OSError):  # a full disk: readers see that the file is old
        status.publish(workers.settings.state, "apply", {"state": state, "sinks": workers.facts()})


if __name__ == "__main__":
    sys.exit(process.main("apply", run))

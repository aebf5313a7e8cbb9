"""The apply process: one Spark driver, one streaming query per sink, each with its own checkpoint and its own luck.

A store that is down keeps only its own query waiting. A query that fails is started again after a while; what ends
the whole process is the loss of Spark itself, and then the supervisor starts it again.
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
_PATIENCE = 60.0
"""Seconds for the apply process of a daemon that was killed: told by the kernel, it still ends its batches."""


def run(settings: Settings, stop: threading.Event, news: process.News) -> None:
    """Apply until `stop` is set, then let each batch in hand end."""
    driver = Driver(settings)
    lanes = SinkWorkers(settings, cdc.log.open_reader(settings), driver)
    _claim(lanes, stop)
    _publish(lanes, "starting")
    try:
        lanes.tend()
        while not stop.wait(_INTERVAL):
            lanes.want(news() or lanes.settings, pauses.read(settings.state))
            lanes.tend()
            _publish(lanes, "running")
    finally:
        _publish(lanes, "stopping")
        lanes.close()
        driver.stop()
        _publish(lanes, "stopped")


def _claim(lanes: SinkWorkers, stop: threading.Event) -> None:
    """Begin the sinks, waiting for a process that is just ending. Raises EnvironmentFault if it does not end."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return lanes.want(lanes.settings, pauses.read(lanes.settings.state))
        except EnvironmentFault as error:
            if time.monotonic() > deadline or stop.wait(1.0):
                raise
            _log.info("waiting: %s", error.message)


def _publish(lanes: SinkWorkers, state: str) -> None:
    with suppress(OSError):  # a full disk: whoever reads the file sees that it is old
        status.publish(lanes.settings.state, "apply", {"state": state, "sinks": lanes.facts()})


if __name__ == "__main__":
    sys.exit(process.main("apply", run))

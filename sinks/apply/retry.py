"""Repeats an action on the store until it succeeds, and waits in between. `error_policy` decides; only this waits."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from cdc.config.settings import RetrySettings
from cdc.errors import GaveUp, Lost, MillraceError, TableRefused
from cdc.fence import guard
from sinks.apply.error_policy import decide
from sinks.apply.errors import Stopped
from sinks.apply.status import SinkStatus

T = TypeVar("T")
_log = logging.getLogger(__name__)
_LOG_EVERY = 20


class Retry:
    """The retries of one sink. Shows in its status whether it runs, waits or was refused."""

    def __init__(
        self,
        name: str,
        status: SinkStatus,
        policy: RetrySettings,
        stop: threading.Event,
        disconnect: Callable[[], None],
    ) -> None:
        self.policy = policy
        self._name = name
        self._status = status
        self._stop = stop
        self._disconnect = disconnect

    def run(self, action: Callable[[], T], attempts: int = 0) -> T:
        """Run the action until it succeeds: while a store is down, changes wait and none is lost.

        Raises Stopped when the process ends, GaveUp after `attempts` failures (0: never), and every error that is
        not transient.
        """
        failures = 0
        while True:
            guard.require()
            try:
                return action()
            except MillraceError as error:
                failures += 1
                decision = decide(error, failures, attempts, self.policy)
                if decision.action == "raise":
                    if not isinstance(error, TableRefused):
                        self._status.state, self._status.error = "refused", str(error)
                    raise
                if decision.action == "give up":
                    self._disconnect()
                    raise GaveUp(f"{error.message} It was tried {attempts} times.", error) from None
                self._wait(error, failures, decision.seconds)

    def succeeded(self) -> None:
        """The store takes writes: the status says so."""
        if self._status.state != "running":
            _log.info("sink %s is running", self._name)
        self._status.state, self._status.error = "running", ""

    def _wait(self, error: MillraceError, failures: int, seconds: float) -> None:
        if isinstance(error, Lost):
            self._disconnect()
        if failures == 1 or not failures % _LOG_EVERY:
            _log.warning("sink %s is waiting: %s", self._name, error)
        self._status.state, self._status.error = "waiting", str(error)
        if self._stop.wait(seconds):
            raise Stopped

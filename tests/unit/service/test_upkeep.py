"""The log's upkeep goes on, whatever one turn of it does."""

import threading

from cdc.errors import LogFull
from cdc.model import Entry, Progress
from cdc.ports import Schemas, Spool
from cdc.service.capture.upkeep import Upkeep
from tests.corpus.registry import Registry
from tests.fix_processes import wait_until


class _Troubled:
    """A log whose upkeep fails twice, once on purpose and once not."""

    def __init__(self) -> None:
        self.turns = 0
        self.thread = ""

    def maintain(self) -> None:
        self.turns += 1
        self.thread = threading.current_thread().name
        if self.turns == 1:
            raise LogFull("no room")
        if self.turns == 2:
            raise RuntimeError("unexpected")

    def progress(self) -> Progress:
        return Progress()

    def append(self, entry: Entry) -> None:
        raise AssertionError("upkeep never appends")

    def spool(self) -> Spool:
        raise AssertionError("upkeep never spools")

    @property
    def append_interval(self) -> float:
        return 0.0

    @property
    def schemas(self) -> Schemas:
        return Registry()

    def close(self) -> None:
        """Nothing is held."""


def test_upkeep_that_failed_is_tried_again_in_a_thread_of_its_own() -> None:
    log = _Troubled()
    with Upkeep(log, every=0.001):
        wait_until(lambda: log.turns >= 4, 10, "the turns after the failures")
    assert log.thread == "upkeep"
    done = log.turns
    assert not any(thread.name == "upkeep" for thread in threading.enumerate())
    assert log.turns == done

"""Failures of a micro-batch, told to Spark in few words.

While a query is being stopped, Spark 4 looks through the whole text of what its batch raised, for the name of an
interruption, with an expression that recurses for every character behind `Py4JJavaError` (StreamExecution.PROXY_ERROR).
A Java trace of 2,000 characters is enough to overflow the thread's stack of 1 MB, and 12,000 for 4 MB: the query then
ends by a StackOverflowError instead of the stop that was asked for. So no trace of the JVM leaves a batch.
"""

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Work = Callable[["DataFrame", int], None]

_NAMED = "py4j.protocol.Py4JJavaError: An error occurred while calling Spark: "
"""How Spark knows an interruption, as far as it reads."""
_INTERRUPTIONS = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)


class BatchFailed(Exception):
    """The JVM failed in a batch. Only the name of what it threw: its message may hold values."""


def _is_news(record: logging.LogRecord) -> bool:
    """A batch that a stop interrupts is none; py4j would print a traceback of it."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, BatchFailed) and str(error).startswith(_NAMED))


logging.getLogger("py4j.clientserver").addFilter(_is_news)


def brief(work: Work) -> Work:
    """The same work; what the JVM throws in it is raised by name only."""

    def run(changes: "DataFrame", number: int) -> None:
        try:
            work(changes, number)
        except Py4JJavaError as error:
            raise BatchFailed(_told(str(error))) from None

    return run


def _told(text: str) -> str:
    for name in _INTERRUPTIONS:
        if name in text:
            return _NAMED + name
    named = re.search(r"\n: ([\w.$]+)", text)
    return named[1] if named else "unknown"

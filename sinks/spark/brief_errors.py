"""Errors of a micro-batch with a short text, because long ones break the stop of a query.

While a query is being stopped, Spark 4 searches the text of the batch's error for the name of an interruption, with a
regular expression that recurses for every character after `Py4JJavaError` (StreamExecution.PROXY_ERROR). A Java stack
trace of 2,000 characters overflows the thread's stack of 1 MB, and 12,000 one of 4 MB: the query then ends with a
StackOverflowError instead of stopping. So no stack trace of the JVM may leave a batch.
"""

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Work = Callable[["DataFrame", int], None]

_INTERRUPTED = "py4j.protocol.Py4JJavaError: An error occurred while calling Spark: "
"""The text by which Spark recognises an interruption."""
_INTERRUPTIONS = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)


class BatchFailed(Exception):
    """The JVM failed in a batch. Has only the name of the exception: its message may contain row values."""


def _is_failure(record: logging.LogRecord) -> bool:
    """False for a batch that was interrupted by a stop: py4j would log a traceback of it."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, BatchFailed) and str(error).startswith(_INTERRUPTED))


logging.getLogger("py4j.clientserver").addFilter(_is_failure)


def brief(work: Work) -> Work:
    """The same work; an exception of the JVM is raised as BatchFailed."""

    def run(changes: "DataFrame", number: int) -> None:
        try:
            work(changes, number)
        except Py4JJavaError as error:
            raise BatchFailed(_exception_name(str(error))) from None
        except PySparkException as error:  # the text has the traceback of the task
            raise BatchFailed(_python_exception_name(str(error))) from None

    return run


def _python_exception_name(text: str) -> str:
    """The exception of a task's Python worker, by its name and where it was raised."""
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    named = re.findall(r"^([\w.]+(?:Error|Exception|Fault|Lost|Corrupt|Injected))\b", text, re.MULTILINE)
    where = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    return _interruption(text) or (named[-1] if named else "PythonException") + where


def _exception_name(text: str) -> str:
    named = re.search(r"\n: ([\w.$]+)", text)
    return _interruption(text) or (named[1] if named else "unknown")


def _interruption(text: str) -> str | None:
    """The text by which Spark recognises the interruption in this one; None if there is none."""
    return next((_INTERRUPTED + name for name in _INTERRUPTIONS if name in text), None)

"""The log lines of a process, as text or as JSON.

Promise: they contain no secret and no row value. Every record is redacted, also those of libraries. The trap: redaction
is only a safety net; messages must name objects, positions and counts only.
"""

import json
import logging
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal, TextIO

from cdc.config.secret import Secret

LogFormat = Literal["console", "json"]

_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    r"(\b(?:password|passwd|pwd|token|secret|api[-_]?key)\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|\S+)", re.I
)
_AUTHORIZATION = re.compile(r"(\bauthorization\s*[:=]\s*)(?:\w+\s+)?\S+", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHORTEST_SECRET = 6  # replacing a one-letter password everywhere would make the lines unreadable


class Redaction:
    """Removes secrets from text: known values, and everything that looks like a credential."""

    def __init__(self, secrets: Iterable[Secret] = ()) -> None:
        values = {secret.reveal() for secret in secrets}
        self._values = sorted((value for value in values if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, "***")
        text = _USERINFO.sub(r"\1***@", text)
        text = _AUTHORIZATION.sub(r"\1***", text)
        return _ASSIGNMENT.sub(r"\1***", text)


def _escaped(text: str) -> str:
    """Escape control characters, so that a table's name cannot fake a line or a colour."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class _Formatter(logging.Formatter):
    def __init__(self, redaction: Redaction, part: str) -> None:
        super().__init__()
        self._redact = redaction
        self._part = part

    def _text(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return _escaped(self._redact(text))


class ConsoleFormatter(_Formatter):
    """`12:00:01 capture  INFO  streaming from 0/15260E0`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        return f"{clock} {self._part:<8} {record.levelname:<7} {self._text(record)}"


class JsonFormatter(_Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(
            {
                "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                "part": self._part,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": self._text(record),
            },
            ensure_ascii=False,
        )


def configure(
    part: str,
    form: LogFormat = "console",
    level: str = "INFO",
    secrets: Iterable[Secret] = (),
    stream: TextIO | None = None,
) -> None:
    """Send all records of this process to one stream (standard error), redacted."""
    redaction = Redaction(secrets)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(redaction, part) if form == "json" else ConsoleFormatter(redaction, part))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # opensearch-py warns of every 404, also if the request asked whether something exists
    for library in ("py4j", "opensearch", "kafka", "urllib3"):
        logging.getLogger(library).setLevel(logging.ERROR)

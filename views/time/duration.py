"""Durations as people write them: `90 seconds`, `5 minutes`, `1 hour 30 minutes`."""

import re
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

_UNITS = {
    "microsecond": 1,
    "us": 1,
    "millisecond": 1_000,
    "ms": 1_000,
    "second": 1_000_000,
    "s": 1_000_000,
    "sec": 1_000_000,
    "minute": 60_000_000,
    "min": 60_000_000,
    "hour": 3_600_000_000,
    "h": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 7 * 86_400_000_000,
}
_PART = re.compile(r"(\d+)\s*([a-z]+)")


def microseconds(text: str) -> int:
    """A duration in microseconds. Raises ValueError with what is wrong."""
    rest, total, found = text.strip().lower(), 0, False
    while match := _PART.match(rest):
        unit = match[2] if match[2] in _UNITS else match[2].removesuffix("s")
        if unit not in _UNITS:
            raise ValueError(f"{match[2]!r} is no unit of time; units: second, minute, hour, day, week, ms")
        total, found = total + int(match[1]) * _UNITS[unit], True
        rest = rest[match.end() :].strip(" ,")
    if rest or not found:
        raise ValueError(f"{text!r} is no duration; write for instance 5 minutes")
    return total


def _duration(value: object) -> object:
    return microseconds(value) if isinstance(value, str) else value


Duration = Annotated[int, BeforeValidator(_duration), PlainSerializer(lambda value: f"{value} us")]
"""A duration of the pipeline file, in microseconds."""

"""What a Redis error means for a batch. The reply's code decides, never its sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, ResponseError, TimeoutError

from cdc.errors import Busy, Lost, MillraceError, SinkError, StoreRefused

_CODE = re.compile(r"^-?([A-Z]{2,})\b|: -([A-Z]{2,})\b")  # the second: an error inside a script, up to Redis 6

_BUSY = {
    "OOM": ("is out of memory", "Raise maxmemory, or choose a policy that evicts."),
    "BUSY": ("runs a script that does not end", "See SCRIPT KILL."),
    "LOADING": ("is loading its data", "It answers when it has finished."),
    "READONLY": ("is a read-only replica", "Point the url to the primary."),
    "MASTERDOWN": ("is a replica without its primary", "Point the url to the primary."),
    "MISCONF": ("refuses writes because it cannot save to disk", "Look at its log."),
    "NOREPLICAS": ("has too few replicas", "See min-replicas-to-write."),
    "CLUSTERDOWN": ("is a cluster that is down", "See CLUSTER INFO."),
    "TRYAGAIN": ("is moving slots", "It answers when it has finished."),
}
_REFUSED = {"NOAUTH", "WRONGPASS", "NOPERM"}


def code_of(error: RedisError) -> str:
    """The code of an error reply, empty if it has none."""
    name = type(error).__name__
    known = {"OutOfMemoryError": "OOM", "BusyLoadingError": "LOADING", "ReadOnlyError": "READONLY"}
    known |= {"NoPermissionError": "NOPERM", "AuthenticationError": "WRONGPASS", "MasterDownError": "MASTERDOWN"}
    known |= {"ClusterDownError": "CLUSTERDOWN", "TryAgainError": "TRYAGAIN", "NoScriptError": "NOSCRIPT"}
    match = _CODE.search(str(error))
    return known.get(name) or (match[1] or match[2] if match else "")


def translated(sink: str, error: RedisError) -> MillraceError:
    """The error of ours that says what to do."""
    code = code_of(error)
    if code in _BUSY:
        what, remedy = _BUSY[code]
        return Busy(f"sink {sink!r}: Redis {what} ({code}).", remedy)
    if code in _REFUSED or isinstance(error, AuthenticationError):
        kind = SinkError if code == "NOPERM" else StoreRefused  # rights may be lacking for the keys of one table
        return kind(
            f"sink {sink!r}: Redis refuses these credentials ({code or 'AUTH'}).",
            "Check username and password; the user needs ~<prefix>* and +@read +@write +@scripting +@connection.",
        )
    if isinstance(error, (ConnectionError, TimeoutError)):
        return Lost(f"sink {sink!r}: Redis cannot be reached ({type(error).__name__}).", "It is tried again.")
    if isinstance(error, ResponseError):
        return SinkError(f"sink {sink!r}: Redis answered {code or 'an error'}.", "Look at its log.")
    return Lost(f"sink {sink!r}: Redis failed ({type(error).__name__}).", "It is tried again.")


@contextmanager
def faults(sink: str) -> Iterator[None]:
    """Turn every Redis error inside into one of ours."""
    try:
        yield
    except redis.RedisError as error:
        raise translated(sink, error) from None

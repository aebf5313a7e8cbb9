"""What a Redis error means for a batch. The code of the reply decides, never its text."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, ResponseError, TimeoutError

from cdc.errors import Busy, Lost, MillraceError, SinkError, StoreRefused

_CODE = re.compile(r"^-?([A-Z]{2,})\b|: -([A-Z]{2,})\b")  # the second form: an error inside a script, up to Redis 6

_BUSY = {
    "OOM": ("is out of memory", "Raise maxmemory, or choose a policy that evicts."),
    "BUSY": ("is running a script of another client that does not end", "See SCRIPT KILL."),
    "LOADING": ("is loading its data", "Millrace retries until it has finished."),
    "READONLY": ("is a read-only replica", "Point the url to the primary."),
    "MASTERDOWN": ("is a replica without its primary", "Point the url to the primary."),
    "MISCONF": ("refuses writes because it cannot save to disk", "See the Redis log."),
    "NOREPLICAS": ("has too few replicas", "See min-replicas-to-write."),
    "CLUSTERDOWN": ("is a cluster that is down", "See CLUSTER INFO."),
    "TRYAGAIN": ("is moving slots", "Millrace retries until it has finished."),
}
_REFUSED = {"NOAUTH", "WRONGPASS", "NOPERM"}


def code_of(error: RedisError) -> str:
    """The code of an error reply; empty if it has none."""
    name = type(error).__name__
    known = {"OutOfMemoryError": "OOM", "BusyLoadingError": "LOADING", "ReadOnlyError": "READONLY"}
    known |= {"NoPermissionError": "NOPERM", "AuthenticationError": "WRONGPASS", "MasterDownError": "MASTERDOWN"}
    known |= {"ClusterDownError": "CLUSTERDOWN", "TryAgainError": "TRYAGAIN", "NoScriptError": "NOSCRIPT"}
    match = _CODE.search(str(error))
    return known.get(name) or (match[1] or match[2] if match else "")


def translated(sink: str, error: RedisError) -> MillraceError:
    """The MillraceError for a Redis error, with its remedy."""
    code = code_of(error)
    if code in _BUSY:
        what, remedy = _BUSY[code]
        return Busy(f"sink {sink!r}: Redis {what} ({code}).", remedy)
    if code in _REFUSED or isinstance(error, AuthenticationError):
        error_class = SinkError if code == "NOPERM" else StoreRefused  # NOPERM may concern the keys of one table only
        return error_class(
            f"sink {sink!r}: Redis refuses these credentials ({code or 'AUTH'}).",
            "Check username and password; the user needs ~<prefix>* and +@read +@write +@scripting +@connection.",
        )
    if isinstance(error, (ConnectionError, TimeoutError)):
        return Lost(f"sink {sink!r}: Redis cannot be reached ({type(error).__name__}).", "Millrace retries.")
    if isinstance(error, ResponseError):
        return SinkError(f"sink {sink!r}: Redis answered {code or 'an error'}.", "See the Redis log.")
    return Lost(f"sink {sink!r}: Redis failed ({type(error).__name__}).", "Millrace retries.")


@contextmanager
def translated_errors(sink: str) -> Iterator[None]:
    """Raise a MillraceError for every Redis error inside."""
    try:
        yield
    except redis.RedisError as error:
        raise translated(sink, error) from None

"""Requests to a log's bucket: their errors are those of a log, and name the bucket."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.errors import ConfigError, LogError, LogLost
from cdc.log.segments.storage import LogLocation
from cdc.object_store.bucket import Bucket

if TYPE_CHECKING:
    from obstore.exceptions import BaseError

_SECONDS = 30.0
"""Limit of a request, and of the time in which it is repeated: a part of 32 MB takes as long at 1 MB/s, and a server
that restarts is back."""
_PROBE_SECONDS = 3.0
_NOTHING = "no-such-object"


class LogBucket(Bucket):
    """A log's bucket. Raises LogLost if it does not answer, LogError if it refuses."""

    def __init__(self, location: LogLocation, seconds: float | None = None) -> None:
        limit, options = _SECONDS if seconds is None else seconds, dict(location.options)
        try:
            super().__init__(location.root, options, limit)
            self._probing = Bucket(location.root, options, min(limit, _PROBE_SECONDS))
        except ValueError:
            raise ConfigError(
                "log.storage_options has an option that is not known, or log.uri is not a bucket.",
                "Options: aws_access_key_id, aws_secret_access_key, aws_region, aws_endpoint_url and more.",
            ) from None

    def failure(self, error: "BaseError") -> Exception:
        """See Bucket. Of a failed listing the client does not say why: reading an object that does not exist does."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return self._refused()
        try:
            self._probing.get(_NOTHING)
        except FileNotFoundError:
            if not self._lists():
                return self._missing()
        except PermissionError:
            return self._refused()
        except OSError:
            pass
        return LogLost(
            f"The bucket {self.name} of the log does not answer ({type(error).__name__}).",
            "It is tried again; check log.uri, aws_endpoint_url and the network if it lasts.",
        )

    def put(self, path: str, content: bytes | Path) -> None:
        """See Bucket."""
        with self._existing():
            super().put(path, content)

    def create(self, path: str, content: bytes) -> None:
        """See Bucket."""
        with self._existing():
            super().create(path, content)

    @contextmanager
    def _existing(self) -> Iterator[None]:
        """What a write does not find is the bucket."""
        try:
            yield
        except FileNotFoundError:
            raise self._missing() from None

    def _refused(self) -> LogError:
        return LogError(
            f"The bucket {self.name} of the log refuses these credentials, or to be used with them.",
            "Check log.storage_options; reading, writing, listing and deleting below log.uri must be allowed.",
        )

    def _missing(self) -> LogError:
        return LogError(f"The bucket {self.name} of the log does not exist.", "Create it, or correct log.uri.")

    def _lists(self) -> bool:
        try:
            return not list(self._probing.listed(_NOTHING))
        except OSError:
            return False


def check_bucket(location: LogLocation, seconds: float) -> None:
    """Raise LogError, which names the bucket, if it refuses or does not answer within so many seconds."""
    bucket = LogBucket(location, seconds / 2)
    for _ in bucket.listed(_NOTHING):
        pass

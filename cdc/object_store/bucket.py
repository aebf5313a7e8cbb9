"""Objects under one prefix of a bucket in S3, or in a store with its protocol.

An object is created whole or not at all, and one PUT with `If-None-Match: *` (`create`) has one winner. Errors are
OSErrors by kind: the texts of the client have the request, so they are not repeated.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

if TYPE_CHECKING:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

_CLIENT_OPTIONS = frozenset(
    {"allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_ca_certificate", "proxy_excludes"}
    | {"proxy_url", "timeout", "user_agent"}
)
_CONNECT_SECONDS = 5.0
_LONGEST_WAIT_SECONDS = 2.0
"""Between two attempts of a request."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing; `tag` changes whenever the object is replaced."""

    path: str
    size: int
    tag: str


class Bucket:
    """A bucket and a prefix in it. Paths are relative to the prefix. Safe to share between threads."""

    def __init__(self, uri: str, options: Mapping[str, str], seconds: float | None = None) -> None:
        """`seconds` limits each request and the time in which it is repeated; None: the client's own limits.

        Raises ValueError if the client does not know an option.
        """
        self.uri = uri
        self._store = _s3_store(uri, options, seconds)

    @property
    def name(self) -> str:
        """The bucket's name, for messages."""
        return urlsplit(self.uri).netloc

    def failure(self, error: "BaseError") -> Exception:
        """The error that an operation raises for one of the client's."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return PermissionError()
        return OSError(type(error).__name__)

    def get(self, path: str) -> bytes:
        """A whole object. Raises FileNotFoundError."""
        import obstore

        with self._errors(path):
            return bytes(obstore.get(self._store, path).bytes())

    def tail(self, path: str, most: int) -> tuple[bytes, int]:
        """The end of an object, at most so many bytes, and the size of the whole. Raises FileNotFoundError."""
        import obstore

        with self._errors(path):
            found = obstore.get(self._store, path, options={"range": {"suffix": most}})
            return bytes(found.bytes()), found.meta["size"]

    def between(self, path: str, start: int, end: int) -> bytes:
        """The bytes from `start` up to, not including, `end`. Raises FileNotFoundError."""
        import obstore

        with self._errors(path):
            return bytes(obstore.get_range(self._store, path, start=start, end=end))

    def put(self, path: str, content: bytes | Path) -> None:
        """Write an object, or replace it. A file is read a few megabytes at a time."""
        import obstore

        with self._errors(path):
            obstore.put(self._store, path, content)

    def create(self, path: str, content: bytes) -> None:
        """Write an object that must not exist. Raises FileExistsError, whoever writes it at the same time.

        The trap: after another error it may exist all the same, now or later.
        """
        import obstore

        with self._errors(path):
            obstore.put(self._store, path, content, mode="create")

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects, if they are there."""
        import obstore

        if paths:
            with self._errors(paths[0]), suppress(FileNotFoundError):
                obstore.delete(self._store, list(paths))

    def copy(self, path: str, target: str) -> None:
        """Copy an object inside the bucket. Raises FileNotFoundError."""
        import obstore

        with self._errors(path):
            obstore.copy(self._store, path, target)

    def listed(self, folder: str, after: str = "") -> Iterator[Listed]:
        """The objects under a folder whose paths are greater than `after`, in order. A thousand cost one request."""
        import obstore

        with self._errors(folder):
            for chunk in obstore.list(self._store, folder, offset=after or None, chunk_size=1000):
                for item in chunk:
                    yield Listed(item["path"], item["size"], item["e_tag"] or "")

    def has_conditional_puts(self, folder: str) -> bool:
        """Whether `create` keeps its promise: a server that ignores `If-None-Match` replaces the object. Tries it."""
        probe = f"{folder}/{uuid4().hex}"
        try:
            self.create(probe, b"")
            self.create(probe, b"")
        except FileExistsError:
            return True
        except NotImplementedError:  # switched off in the options
            return False
        else:
            return False
        finally:
            with suppress(OSError):
                self.delete([probe])

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(2, "No such object", path) from None
        except AlreadyExistsError:
            raise FileExistsError from None
        except BaseError as error:
            raise self.failure(error) from None


def _s3_store(uri: str, options: Mapping[str, str], seconds: float | None) -> "S3Store":
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    named = {name.lower().removeprefix("aws_"): value for name, value in options.items()}
    client: dict[str, Any] = {name: value for name, value in named.items() if name in _CLIENT_OPTIONS}
    config: dict[str, Any] = {name: value for name, value in named.items() if name not in _CLIENT_OPTIONS}
    retry: Any = None
    if seconds is not None:
        limits = {"timeout": seconds, "connect_timeout": min(seconds, _CONNECT_SECONDS)}
        client = {**{name: f"{int(limit * 1000)}ms" for name, limit in limits.items()}, **client}
        waits = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=_LONGEST_WAIT_SECONDS)}
        retry = {"max_retries": 100, "retry_timeout": timedelta(seconds=seconds), "backoff": waits}
    try:
        return S3Store.from_url(uri, config=cast("Any", config), client_options=cast("Any", client), retry_config=retry)
    except BaseError as error:
        raise ValueError(type(error).__name__) from None

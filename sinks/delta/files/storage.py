"""The files of one Delta table, on a local disk or in S3: read them, put new ones beside them, create if absent.

`deltalake` reads and writes tables itself; this is for what Millrace writes by hand, which are commits with deletion
vectors and files that a later commit adds. A commit must never replace another one: on a disk it is a hard link, in S3
one PUT with `If-None-Match: *`, which is also what `deltalake` uses there, so the two exclude each other.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import pyarrow as pa
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs

from cdc.durable_files import create, sync_written
from cdc.object_store.bucket import Bucket

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from deltalake import DeltaTable

LOG = "_delta_log"
STAGING = "_millrace_staging"
_MODE = 0o666  # less the umask, as `deltalake` writes: other users may read the table


class TableSource(Protocol):
    """Opens the files of one table."""

    @property
    def uri(self) -> str:
        """Where the table is."""

    def open(self, path: str) -> pa.NativeFile:
        """A file for random access. Raises FileNotFoundError."""


class TableStorage(TableSource, Protocol):
    """The files of one table. Paths are relative to the table, and not URL-encoded."""

    def read(self, path: str) -> bytes:
        """A whole small file. Raises FileNotFoundError."""

    def create(self, path: str, content: bytes) -> None:
        """Write a file whole or not at all. Raises FileExistsError if it exists, whoever writes it at the same time."""

    def excludes_others(self) -> bool:
        """Whether `create` keeps its promise here; tried once."""

    def folder_for_new_files(self) -> "AbstractContextManager[Path]":
        """A local folder for files that `put` takes; removed afterwards."""

    def put(self, file: Path) -> None:
        """Take a finished file from that folder into the table, under its own name. No commit has it yet."""


class LocalFolder:
    """A table on a local disk or a shared file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._links: bool | None = None

    @property
    def uri(self) -> str:
        """Where the table is."""
        return str(self.folder)

    def read(self, path: str) -> bytes:
        """See TableStorage."""
        return (self.folder / path).read_bytes()

    def open(self, path: str) -> pa.NativeFile:
        """See TableStorage."""
        return pa.memory_map(str(self.folder / path))

    def create(self, path: str, content: bytes) -> None:
        """See TableStorage. The content is durable on return, the name once the folder is synced."""
        create(self.folder / path, content, _MODE)

    def excludes_others(self) -> bool:
        """Whether the file system has hard links: a commit by a link never replaces another one."""
        if self._links is None:
            self._links = _hard_links(self.folder / LOG)
        return self._links

    @contextmanager
    def folder_for_new_files(self) -> Iterator[Path]:
        """On the table's own file system, so that a rename puts the files in place."""
        stage = self.folder / STAGING / uuid4().hex
        yield stage
        shutil.rmtree(stage, ignore_errors=True)

    def put(self, file: Path) -> None:
        """See TableStorage. Durable on return: only the machine that wrote a file can make it so."""
        placed = file.replace(self.folder / file.name)
        sync_written(placed)


class S3Folder:
    """A table in S3, or in a store with its protocol."""

    def __init__(self, uri: str, options: Mapping[str, str], bucket: Bucket) -> None:
        self.uri = uri
        self._options = dict(options)
        self._bucket = bucket
        self._excludes: bool | None = None
        self._files: fs.FileSystem | None = None

    def read(self, path: str) -> bytes:
        """See TableStorage."""
        return self._bucket.get(path)

    def open(self, path: str) -> pa.NativeFile:
        """See TableStorage."""
        if self._files is None:
            self._files = fs.PyFileSystem(cast("Any", DeltaStorageHandler(self.uri, self._options)))
        return self._files.open_input_file(path)

    def create(self, path: str, content: bytes) -> None:
        """See TableStorage."""
        self._bucket.create(path, content)

    def excludes_others(self) -> bool:
        """Whether the server honours `If-None-Match`; one that ignores the header replaces the object."""
        if self._excludes is None:
            self._excludes = self._bucket.has_conditional_puts(STAGING)
        return self._excludes

    def check(self) -> None:
        """Write and remove a probe. Raises FileNotFoundError (no such bucket), PermissionError or OSError."""
        probe = f"{STAGING}/{uuid4().hex}"
        self._bucket.put(probe, b"")
        self._bucket.delete([probe])

    @contextmanager
    def folder_for_new_files(self) -> Iterator[Path]:
        """In the temporary folder of this machine."""
        with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
            yield Path(folder) / "table"

    def put(self, file: Path) -> None:
        """See TableStorage."""
        self._bucket.put(file.name, file)


class _OpenedTable:
    """The files of a table that `deltalake` has open in an object store."""

    def __init__(self, table: "DeltaTable") -> None:
        self.uri = table.table_uri
        self._files = fs.PyFileSystem(cast("Any", DeltaStorageHandler.from_table(table._table)))

    def open(self, path: str) -> pa.NativeFile:
        """See TableSource."""
        return self._files.open_input_file(path)


def source_of(table: "DeltaTable") -> TableSource:
    """The files of an opened table."""
    uri = urlsplit(table.table_uri)
    return LocalFolder(Path(unquote(uri.path))) if uri.scheme in ("", "file") else _OpenedTable(table)


def storage_of(uri: str, options: Mapping[str, str]) -> LocalFolder | S3Folder | None:
    """The files of a table; None where only `deltalake` can write.

    So in other object stores, and with options that say how `deltalake` excludes other writers in S3 (a lock table,
    unsafe renames): a conditional PUT would not be seen by it.
    """
    if "://" not in uri:
        return LocalFolder(Path(uri))
    if uri.split("://", maxsplit=1)[0] not in ("s3", "s3a"):
        return None
    try:
        return S3Folder(uri, options, Bucket(uri, options))
    except ValueError:
        return None


def clear_staging(folder: Path, older_than: float = 3600.0) -> None:
    """Remove the staging folders of killed writers."""
    for stage in (folder / STAGING).glob("*"):
        if time.time() - stage.stat().st_mtime > older_than:
            shutil.rmtree(stage, ignore_errors=True)


def _hard_links(folder: Path) -> bool:
    one, two = (folder / f".{uuid4().hex}.tmp" for _ in range(2))
    try:
        one.touch()
        os.link(one, two)
    except OSError:
        return False
    finally:
        one.unlink(missing_ok=True)
        two.unlink(missing_ok=True)
    return True

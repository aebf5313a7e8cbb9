"""What a failed access to a table means, by the state of its folder or bucket: the errors of Delta are texts."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from cdc.errors import Busy, Lost, SinkError, StoreRefused
from cdc.model import TableId
from sinks.delta.files.storage import LocalFolder, S3Folder, TableStorage
from sinks.delta.fingerprint import missing_files

LEAST_FREE = 16 * 1024 * 1024
"""Free bytes below which a failed write counts as a full disk; a merge's smallest file is far smaller."""


def sink_error(table: TableId, storage: TableStorage | None, uri: str, error: Exception) -> SinkError:
    """Millrace's error for one of Delta's."""
    found = None
    if isinstance(storage, LocalFolder):
        found = _folder_error(table, storage.folder)
    elif isinstance(storage, S3Folder):
        found = _bucket_error(table, storage)
    return found or _other_error(table, storage, uri, error)


def _folder_error(table: TableId, folder: Path) -> SinkError | None:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if shutil.disk_usage(existing).free < LEAST_FREE:
        return Busy(f"table {table}: the disk is full.", "Free some space; it is tried again.", 5.0)
    if not os.access(existing, os.W_OK):
        return SinkError(f"table {table}: its folder cannot be written.", f"Check the owner of {existing}.")
    return None


def _bucket_error(table: TableId, storage: S3Folder) -> SinkError | None:
    bucket = urlsplit(storage.uri).netloc
    try:
        storage.check()
    except FileNotFoundError:
        return StoreRefused(f"The bucket {bucket} does not exist.", "Create it, or correct `path`.")
    except PermissionError:
        return StoreRefused(
            f"The bucket {bucket} refuses these credentials, or to be written with them.", "Check `storage_options`."
        )
    except OSError:
        return Lost(f"table {table}: the object store cannot be reached.", "It is tried again.")
    return None


def _other_error(table: TableId, storage: TableStorage | None, uri: str, error: Exception) -> SinkError:
    remedy = f"Check {uri}; if it was removed on purpose, fill it again with: millrace backfill {table}"
    folder = storage.folder if isinstance(storage, LocalFolder) else None
    if isinstance(error, TableNotFoundError) or (folder is not None and not folder.exists()):
        return Lost(f"table {table}: its path has no Delta table any more.", remedy)
    if folder is not None and _files_missing(folder):
        return Lost(f"table {table}: files of the Delta table are gone.", remedy)
    if isinstance(error, OSError):
        return Lost(f"table {table}: the store cannot be reached ({type(error).__name__}).", remedy)
    return SinkError(
        f"table {table}: Delta refused ({type(error).__name__}).", "The cause is in the log of this process."
    )


def _files_missing(folder: Path) -> bool:
    with suppress(DeltaError, OSError):
        return bool(missing_files(DeltaTable(folder), folder))
    return False

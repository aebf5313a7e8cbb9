"""Durable files: written aside, synced, renamed. Never follows a symbolic link, never readable by others.

OSError stays inside: no room becomes LogFull, a vanished writer folder LogFenced.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cdc.errors import EnvironmentFault, LogError, LogFenced, LogFull

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_folder(path: Path) -> None:
    """Make it with its parents, private to us. Refuses a symbolic link in its place."""
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        if path.is_symlink():
            raise EnvironmentFault(f"{path} is a symbolic link.", "Put a real folder there, or change `state`.")
        path.chmod(FOLDER_MODE)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise LogFull(f"No room left for {path}.", "Free space or raise the quota; it goes on.") from None
        raise EnvironmentFault(f"{path}: {error.strerror}.", "Make it writable for this user.") from None


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Translate the errors of writing: nothing is visible yet when they come, so the caller may try again."""
    try:
        yield
    except FileNotFoundError:
        raise LogFenced(
            f"The writer folder {path.name} is gone: another writer took over.", "Stop this process."
        ) from None
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise LogFull(f"No room left under {path.parent}.", "Free space or raise the quota; it goes on.") from None
        raise LogError(
            f"Writing under {path.parent} failed: {error.strerror}.", "Look at the disk and the folder's permissions."
        ) from None


def open_new(path: Path, mode: int = FILE_MODE) -> int:
    """A descriptor of a file that must not exist, to write and read."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def open_or_make(path: Path) -> int:
    """A descriptor of a file that need not exist, such as one that is only locked. Refuses symbolic links (ELOOP)."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def write_new(path: Path, data: bytes | memoryview, mode: int = FILE_MODE) -> None:
    """Write and sync a file that must not exist. On any error nothing of it is left."""
    descriptor = open_new(path, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)  # a network file system may say only here that there is no room
    except OSError:
        path.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    _sync(path, os.O_DIRECTORY | os.O_NOFOLLOW)


def sync_written(path: Path) -> None:
    """Make a file or folder durable that another library wrote. Follows links: a table may lie behind one."""
    _sync(path, 0)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Exchange a small file in one instant; durable on return."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_new(aside, data)
    try:
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_unsynced(path: Path, data: bytes) -> None:
    """Exchange a file in one instant. It may be lost in a power cut: for what is written again by itself."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE), "wb") as file:
            file.write(data)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def create(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Make a file whole or not at all. Raises FileExistsError: unlike a rename, a link never replaces.

    Its content is durable on return, its name once the folder is synced.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_new(aside, data, mode)
    try:
        os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def open_existing(path: Path) -> int:
    """A descriptor to read from. Refuses symbolic links (ELOOP)."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(path, ignore_errors=True)

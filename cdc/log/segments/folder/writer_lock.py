"""Exactly one writer: a file lock prevents a second writer, and an epoch folder fences off a paused one.

A writer publishes by renaming files out of its own staging folder, `.writer-<epoch>`. A new writer creates the folder
of the next epoch and removes all older ones *before* it lists the log. A paused writer that resumes later finds its
folder gone: it can neither create a file there nor rename one out of it, so it never publishes again.
"""

import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Self

from cdc.durable_files import FOLDER_MODE, make_folder, open_or_make, remove, sync_folder, write_errors
from cdc.errors import LogFenced

_WRITER = re.compile(r"\.writer-(\d{8})")


class WriterLock:
    """The right to publish, until another writer takes over."""

    def __init__(self, root: Path, staging: Path, lock: int) -> None:
        self._root = root
        self.staging = staging
        self._lock = lock

    @classmethod
    def take(cls, root: Path, takeover: bool = False) -> Self:
        """Become the writer. Raises LogFenced while another process has the lock, unless `takeover` is set."""
        make_folder(root)
        with write_errors(root / "lock"):
            lock = open_or_make(root / "lock")
        try:
            with write_errors(root / "lock"):
                lock_file(lock, root, takeover)
                staging = _next_epoch(root)
        except BaseException:
            os.close(lock)
            raise
        return cls(root, staging, lock)

    def rename(self, staged: Path, target: Path) -> None:
        """Make a synced file or folder visible. Durable once the target's folder is synced."""
        with write_errors(self.staging):
            staged.rename(target)

    def remove_published(self, path: Path) -> None:
        """Hide a published file or folder with one rename, then remove it."""
        self.require()
        renamed = self.staging / f"gone-{secrets.token_hex(8)}"
        with write_errors(self.staging):
            try:
                path.rename(renamed)
            except FileNotFoundError:
                return
        remove(renamed)

    def require(self) -> None:
        """Raise LogFenced if another writer has taken over."""
        if not self.staging.is_dir():
            raise LogFenced(
                f"The writer folder {self.staging.name} is gone: another writer took over.", "Stop this process."
            )

    def release(self) -> None:
        """Allow the next writer to open the log."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def lock_file(lock: int, root: Path, takeover: bool) -> None:
    """Lock an open file for this process. Raises LogFenced, which names the process that has the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not takeover:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise LogFenced(
                f"Another process writes to {root} (pid {holder}).", "Stop it first: a log has one writer."
            ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


def _next_epoch(root: Path) -> Path:
    epochs = [int(match[1]) for entry in root.iterdir() if (match := _WRITER.fullmatch(entry.name))]
    staging = root / f".writer-{max(epochs, default=0) + 1:08d}"
    try:
        staging.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        raise LogFenced(f"Another process just became the writer of {root}.", "Stop it first.") from None
    for epoch in epochs:
        _remove_epoch(root / f".writer-{epoch:08d}")
    for leftover in root.glob(".dead-*"):
        remove(leftover)
    sync_folder(root)
    return staging


def _remove_epoch(folder: Path) -> None:
    """Rename the folder first, so that its owner cannot add files while it is emptied."""
    renamed = folder.with_name(f".dead-{secrets.token_hex(8)}")
    try:
        folder.rename(renamed)
    except FileNotFoundError:
        return
    remove(renamed)
    if renamed.exists():
        raise LogFenced(f"{renamed} could not be removed, so an older writer could still write.", "Remove it by hand.")

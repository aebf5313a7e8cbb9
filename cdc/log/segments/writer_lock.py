"""Exactly one writer: a lock against mistakes, and an epoch folder against zombies.

A writer publishes by renaming out of a folder of its own, `.writer-<epoch>`. Who takes over makes the folder of the
next epoch and removes every older one *before* it looks at the log. A stopped writer that wakes up later finds its
folder gone: no file can be made in it and no rename can leave it, so it never publishes anything again.
"""

import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Self

from cdc.durable_files import FOLDER_MODE, make_folder, open_or_make, remove, room, sync_folder
from cdc.errors import LogFenced

_WRITER = re.compile(r"\.writer-(\d{8})")


class WriterLock:
    """The right to publish, for as long as nobody takes it over."""

    def __init__(self, root: Path, aside: Path, lock: int) -> None:
        self._root = root
        self.aside = aside
        self._lock = lock

    @classmethod
    def take(cls, root: Path, takeover: bool = False) -> Self:
        """Become the writer. Raises LogFenced while another has the lock, unless told to take over."""
        make_folder(root)
        with room(root / "lock"):
            lock = open_or_make(root / "lock")
        try:
            with room(root / "lock"):
                _seize(lock, root, takeover)
                aside = _next_epoch(root)
        except BaseException:
            os.close(lock)
            raise
        return cls(root, aside, lock)

    def rename(self, aside: Path, target: Path) -> None:
        """Make a finished file or folder visible: it must have been synced. Durable once its new folder is synced."""
        with room(self.aside):
            aside.rename(target)

    def withdraw(self, path: Path) -> None:
        """Take a published file or folder out of sight in one instant, then remove it."""
        self.require()
        grave = self.aside / f"gone-{secrets.token_hex(8)}"
        with room(self.aside):
            try:
                path.rename(grave)
            except FileNotFoundError:
                return
        remove(grave)

    def require(self) -> None:
        """Raise LogFenced if another writer has taken over."""
        if not self.aside.is_dir():
            raise LogFenced(
                f"The writer folder {self.aside.name} is gone: another writer took over.", "Stop this process."
            )

    def release(self) -> None:
        """Let the next writer in."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _seize(lock: int, root: Path, takeover: bool) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not takeover:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise LogFenced(
                f"Another process writes to {root} (pid {holder}).", "Stop it first; one log has one writer."
            ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


def _next_epoch(root: Path) -> Path:
    epochs = [int(match[1]) for entry in root.iterdir() if (match := _WRITER.fullmatch(entry.name))]
    aside = root / f".writer-{max(epochs, default=0) + 1:08d}"
    try:
        aside.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        raise LogFenced(f"Another process took over {root} just now.", "Let it write, or stop it first.") from None
    for epoch in epochs:
        _bury(root / f".writer-{epoch:08d}")
    for leftover in root.glob(".dead-*"):
        remove(leftover)
    sync_folder(root)
    return aside


def _bury(folder: Path) -> None:
    """Renamed first, so that its owner can put nothing more into it while it is emptied."""
    grave = folder.with_name(f".dead-{secrets.token_hex(8)}")
    try:
        folder.rename(grave)
    except FileNotFoundError:
        return
    remove(grave)
    if grave.exists():
        raise LogFenced(f"{grave} could not be removed, so an older writer could still write.", "Remove it by hand.")

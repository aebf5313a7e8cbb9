"""The lease of a pipeline: which daemon is active. A numbered file in the state folder that its holder renews.

The file with the highest number is the lease. Only its holder writes into it, in place, so that a full disk does not
end a lease. Taking over creates the next number (exactly one process can) and removes all lower ones; from then on the
earlier holder cannot renew, and every process of it that asks finds its file gone (see `cdc.fence.guard`).

Numbers are never used again: a released lease keeps its file.
"""

import errno
import json
import os
import re
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cdc.durable_files import create, make_folder, open_existing, remove, sync_folder
from cdc.fence.guard import is_gone

_NAME = re.compile(r"\d{8}")
_SIZE = 1024  # bytes of a record: always the same, so that renewing it needs no room on the disk


class LeaseTaken(Exception):
    """Another daemon has the lease."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A daemon: the machine's name for people, and what tells processes of different machines and containers apart."""

    host: str
    place: str
    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    @property
    def known_dead(self) -> bool:
        """Whether its process has certainly ended. Never certain of a process elsewhere."""
        if self.place != here().place:
            return False
        return self.pid == os.getpid() or not _runs(self.pid)


@dataclass(frozen=True, slots=True)
class Record:
    """What the holder says of itself, about once a second."""

    number: int
    holder: Holder
    beat: int = 0
    source_lost: float | None = None
    """Seconds since the source last answered the holder; None while it answers, or nobody asks."""
    released: bool = False
    taken_from: str = ""
    """Why it was taken over, if it was."""
    takeovers: int = 0
    """How often this pipeline was taken over, this time included."""


@cache
def here() -> Holder:
    """This process."""
    return Holder(socket.gethostname(), f"{_machine()}:{Path('/proc/self/ns/pid').readlink()}", os.getpid())


def _machine() -> str:
    """Differs between machines. systemd's ProcSubset=pid hides the boot id."""
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with suppress(OSError):
            return f"{socket.gethostname()}:{Path(path).read_text(encoding='ascii').strip()}"
    return secrets.token_hex(16)


def _runs(pid: int) -> bool:
    """Whether a process of this machine runs. One that was killed is listed until its parent has asked for its end."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    except OSError:  # of another user
        return True
    return state != "Z"


def folder_of(state: Path) -> Path:
    """The folder of a pipeline's leases."""
    return state / "leases"


def current(state: Path) -> Record | None:
    """The lease, or None if this pipeline never had one."""
    numbers = _numbers(folder_of(state))
    return _read(folder_of(state), max(numbers)) if numbers else None


class Lease:
    """The lease of this process."""

    def __init__(self, folder: Path, record: Record) -> None:
        self._folder = folder
        self.record = record

    @classmethod
    def take(cls, state: Path, before: Record | None, taken_from: str = "") -> "Lease":
        """Take the lease after `before`, which `current` returned. Raises LeaseTaken if another process was faster."""
        folder = folder_of(state)
        make_folder(folder)
        number = 1 if before is None else before.number + 1
        takeovers = (0 if before is None else before.takeovers) + bool(taken_from)
        record = Record(number, here(), taken_from=taken_from, takeovers=takeovers)
        try:
            create(_path(folder, number), _encoded(record))
        except FileExistsError:
            raise LeaseTaken from None
        others = _numbers(folder) - {number}
        if any(other > number for other in others):  # two others took over since `current`
            remove(_path(folder, number))
            raise LeaseTaken
        for other in others:
            remove(_path(folder, other))
        sync_folder(folder)
        return cls(folder, record)

    @property
    def path(self) -> Path:
        """The file that must exist as long as this process is the holder."""
        return _path(self._folder, self.record.number).absolute()

    @property
    def lost(self) -> bool:
        """Whether another daemon has taken over."""
        return is_gone(self.path)

    def renew(self, source_lost: float | None = None) -> None:
        """Show that this holder is alive. Raises LeaseTaken if another has taken over, OSError if nobody can tell."""
        self._write(replace(self.record, beat=self.record.beat + 1, source_lost=source_lost))

    def release(self) -> None:
        """Let the next daemon start at once."""
        self._write(replace(self.record, released=True))

    def _write(self, record: Record) -> None:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                raise LeaseTaken from None
            raise
        try:
            os.pwrite(descriptor, _encoded(record), 0)
        finally:
            os.close(descriptor)
        self.record = record


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def _numbers(folder: Path) -> set[int]:
    try:
        return {int(path.name) for path in folder.iterdir() if _NAME.fullmatch(path.name)}
    except FileNotFoundError:
        return set()


def _encoded(record: Record) -> bytes:
    return json.dumps(asdict(record)).encode().ljust(_SIZE)


def _read(folder: Path, number: int) -> Record:
    """The record of a lease. One that cannot be parsed has no beat: it is watched, and taken over if it stays so."""
    try:
        descriptor = open_existing(_path(folder, number))
    except FileNotFoundError:
        return Record(number, Holder("?", "", 0))
    try:
        facts: dict[str, Any] = json.loads(os.read(descriptor, _SIZE))
        return Record(**{**facts, "holder": Holder(**facts["holder"])})
    except (ValueError, KeyError, TypeError):
        return Record(number, Holder("?", "", 0))
    finally:
        os.close(descriptor)

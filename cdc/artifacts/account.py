"""The user that local servers run as, and private files. Postgres and OpenSearch refuse root, so root starts them as
`nobody`."""

import os
import pwd
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from cdc.config.secret import Secret
from cdc.durable_files import open_new
from cdc.errors import EnvironmentFault


@dataclass(frozen=True, slots=True)
class Account:
    """An ordinary user of this machine."""

    name: str
    uid: int
    gid: int


def account() -> Account | None:
    """The user to switch to; None if this process does not run as root."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise EnvironmentFault(
            "There is no user `nobody` to run the servers as, and they refuse to run as root.",
            "Create it, or start Millrace as an ordinary user.",
        ) from None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def reachable(folder: Path, who: Account | None) -> bool:
    """Whether that user may enter the folder and all its parents."""
    if who is None:
        return True
    resolved = folder.resolve()
    return all(_passable(step, who) for step in (resolved, *resolved.parents) if step.exists())


def _passable(folder: Path, who: Account) -> bool:
    info = folder.stat()
    if info.st_uid == who.uid:
        return bool(info.st_mode & stat.S_IXUSR)
    if info.st_gid == who.gid:
        return bool(info.st_mode & stat.S_IXGRP)
    return bool(info.st_mode & stat.S_IXOTH)


def set_owner(path: Path, who: Account | None) -> None:
    """Make that user the owner of an empty folder."""
    if who is not None:
        os.chown(path, who.uid, who.gid, follow_symlinks=False)


def write_private_file(path: Path, text: str, who: Account | None) -> None:
    """Write a file that belongs to that user and that no other user can read, into a folder that the user can write to.

    Always creates the file: root must not follow a symbolic link that another user put there.
    """
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as stream:
        if who is not None:
            os.fchown(handle, who.uid, who.gid)
        stream.write(text)


def secret_in(path: Path) -> Secret:
    """The secret in a file that only this user can read; made the first time."""
    if not path.is_file():
        with os.fdopen(open_new(path), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    return Secret(path.read_text(encoding="ascii").strip())

"""The folders of local servers: home (their data) and cache (their programs)."""

import hashlib
import os
import stat
from pathlib import Path

from cdc.artifacts.account import Account, account, reachable, set_owner
from cdc.errors import EnvironmentFault


def home_folder() -> Path:
    """`MILLRACE_HOME`, else `.millrace` under the current folder."""
    return Path(os.environ.get("MILLRACE_HOME") or Path.cwd() / ".millrace").absolute()


def cache_folder() -> Path:
    """`MILLRACE_CACHE`, else the user's cache folder; /var/cache/millrace for root, whose home other users cannot
    enter.

    It may be read-only (a container image with everything in it) or not exist yet: the first download creates it.
    """
    if chosen := os.environ.get("MILLRACE_CACHE"):
        return _checked(Path(chosen).absolute())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return _checked(base / "millrace" if reachable(base, account()) else Path("/var/cache/millrace"))


def _checked(folder: Path) -> Path:
    if not reachable(folder, account()):
        raise EnvironmentFault(
            f"The user that runs the servers cannot read the cache folder {folder}.",
            "Set MILLRACE_CACHE to a folder that every user may enter.",
        )
    return folder


def make(folder: Path, mode: int) -> None:
    """Create a folder with exactly this mode. Raises EnvironmentFault if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError
        if (folder.stat().st_mode & 0o777) != mode and folder.stat().st_uid == os.geteuid():
            folder.chmod(mode)
    except OSError as error:
        raise EnvironmentFault(
            f"The folder {folder} cannot be written{_because(error)}.",
            "Choose another one with MILLRACE_HOME (servers) or MILLRACE_CACHE (downloads), or change its permissions.",
        ) from None


def _because(error: OSError) -> str:
    return f" ({error.strerror})" if error.strerror else ""


def _require_own_folder(folder: Path) -> None:
    """Raise if another user owns the folder: every user can create one in /var/tmp."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise EnvironmentFault(
            f"{folder} belongs to another user.", "Set MILLRACE_HOME to a folder that every user may enter."
        )


def data_folder(home: Path, name: str, who: Account | None) -> Path:
    """The data folder of a server, created if necessary and owned by its user.

    Under `home` if that user can enter it; otherwise under /var/tmp, with a symbolic link in `home`.
    """
    folder = home / name
    if not reachable(home, who):
        digest = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]
        outside = Path("/var/tmp") / f"millrace-{digest}"  # noqa: S108 (see _require_own_folder)
        make(outside, 0o711)
        _require_own_folder(outside)
        if not folder.is_symlink():
            folder.symlink_to(outside / name)
        folder = outside / name
    if not folder.exists():
        folder.mkdir(mode=0o700)
        set_owner(folder, who)
    return folder

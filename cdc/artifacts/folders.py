"""Where things lie: the state folder (data of the servers), the cache (programs), and a way around closed folders."""

import hashlib
import os
import stat
from pathlib import Path

from cdc.artifacts.account import Account, account, give, reachable
from cdc.errors import EnvironmentFault


def home_folder() -> Path:
    """`MILLRACE_HOME`, else `.millrace` under the current folder."""
    return Path(os.environ.get("MILLRACE_HOME") or Path.cwd() / ".millrace").absolute()


def cache_folder() -> Path:
    """`MILLRACE_CACHE`, else the user's cache folder; for root, whose home is closed to others, /var/cache/millrace.

    It may be read-only (an image that brings everything along) or not there yet: whoever writes makes it.
    """
    if chosen := os.environ.get("MILLRACE_CACHE"):
        return _checked(Path(chosen).absolute())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return _checked(base / "millrace" if reachable(base, account()) else Path("/var/cache/millrace"))


def _checked(folder: Path) -> Path:
    if not reachable(folder, account()):
        raise EnvironmentFault(
            f"The cache folder {folder} cannot be read by the user that the servers run as.",
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


def _refuse_stranger(folder: Path) -> None:
    """In a folder that everybody may write to, somebody may have been there first."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise EnvironmentFault(
            f"{folder} belongs to somebody else.", "Set MILLRACE_HOME to a folder that every user may enter."
        )


def data_folder(home: Path, name: str, who: Account | None) -> Path:
    """The server's own folder, made if need be and owned by its user.

    Under `home` where that user can get there; otherwise under /var/tmp, with a link in `home` that shows where.
    """
    place = home / name
    if not reachable(home, who):
        digest = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]
        outside = Path("/var/tmp") / f"millrace-{digest}"  # noqa: S108 (see _refuse_stranger)
        make(outside, 0o711)
        _refuse_stranger(outside)
        if not place.is_symlink():
            place.symlink_to(outside / name)
        place = outside / name
    if not place.exists():
        place.mkdir(mode=0o700)
        give(place, who)
    return place

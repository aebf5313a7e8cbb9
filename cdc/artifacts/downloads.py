"""Downloads sets of files once, verifies them against `pins.yaml`, and then uses them from the cache offline.

A download goes into a temporary folder, which is renamed once every file has the pinned SHA-256: a folder that exists
is complete. Its name contains a digest of its pins, so a changed pin leads to another folder.
"""

import contextlib
import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import yaml

from cdc.artifacts.folders import cache_folder, make
from cdc.artifacts.progress import Report
from cdc.errors import EnvironmentFault

PINS = Path(__file__).with_name("pins.yaml")


@cache
def pins() -> Mapping[str, Mapping[str, str]]:
    """Every set of files that can be downloaded: its name, then file name → SHA-256."""
    return dict(yaml.safe_load(PINS.read_text()))


def folder_of(name: str) -> Path:
    """The folder of a set in the cache; it may not exist yet."""
    text = "".join(f"{file}{digest}" for file, digest in sorted(pins()[name].items()))
    return cache_folder() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def provide(
    name: str,
    fetch: Callable[[Path], None],
    unpack: Callable[[Path], None] | None,
    report: Report,
    *,
    one_of: bool = False,
) -> Path:
    """The folder of a set, downloaded if it does not exist. `fetch` puts the pinned files into a folder, `unpack`
    extracts archives in it. With `one_of` the pins are alternatives (a wheel per platform), and one of them is enough.

    Several processes may call it at once: one downloads, the others wait.
    """
    final = folder_of(name)
    if final.is_dir():
        return final
    make(final.parent, 0o755)
    with locked(final.with_name(f"{final.name}.lock")):
        if final.is_dir():
            return final
        report(f"downloading {name} (once)")
        for leftover in final.parent.glob(f".{name}-*"):  # of a killed process: this one has the lock
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
        try:
            fetch(temporary)
            _verify(name, temporary, one_of)
            if unpack is not None:
                unpack(temporary)
            _let_all_users_read(temporary)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock out other processes; the kernel releases the lock if this process dies."""
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def digest_of(path: Path) -> str:
    """SHA-256 in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _verify(name: str, folder: Path, one_of: bool) -> None:
    expected = pins()[name]
    for path in sorted(folder.iterdir()):
        if path.name not in expected:
            raise EnvironmentFault(f"The download of {name} contains {path.name}, which is not pinned.", _REMEDY)
        if digest_of(path) != expected[path.name]:
            raise EnvironmentFault(f"{path.name} does not have the SHA-256 pinned in pins.yaml.", _REMEDY)
    present = {path.name for path in folder.iterdir()}
    missing = expected.keys() - present
    if not present or (missing and not one_of):
        raise EnvironmentFault(f"The download of {name} lacks {', '.join(sorted(missing))}.", _REMEDY)


_REMEDY = "Nothing was installed. Try again; if it fails again, the package repository serves other files."


def _let_all_users_read(folder: Path) -> None:
    """The user that runs the servers must be able to read it, whatever the umask is."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode & 0o777
            path.chmod(mode | (0o755 if path.is_dir() or mode & 0o100 else 0o644))

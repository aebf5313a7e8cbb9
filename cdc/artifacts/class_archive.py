"""Class archives of the JVM (AppCDS): a JVM that loads its classes from one starts with half the CPU.

The first run of a program writes an archive under a temporary name when it ends (a few seconds, once). The next start
tests that file and renames it if the JVM accepts it. Without a matching archive, or if the cache is read-only, the JVM
only starts slower.
"""

import contextlib
import hashlib
import os
import secrets
import subprocess
from pathlib import Path

from cdc.artifacts.account import Account, set_owner
from cdc.artifacts.folders import cache_folder

_LEARN = "-XX:ArchiveClassesAtExit="


def class_archive(
    runtime: Path, name: str, classpath: str, who: Account | None, *, learn: bool = True
) -> tuple[str, ...]:
    """JVM flags that use the archive of this program, runtime and class path, or write one if `learn`.

    `who` runs the JVM and owns the folder of the archives: no other user may provide classes for it.
    """
    try:
        folder = _folder(who)
    except OSError:
        return ()
    archive = folder / f"{name}-{_fingerprint(runtime, classpath)}.jsa"
    if archive.is_file() or _adopt_archive(runtime, archive, classpath):
        _remove_others(archive)
        return (f"-XX:SharedArchiveFile={archive}", "-Xlog:disable")
    if not learn or (who is None and not os.access(folder, os.W_OK)):
        return ()
    return (f"{_LEARN}{archive.with_suffix('')}.{secrets.token_hex(4)}.new", "-Xlog:disable")


def _remove_others(archive: Path) -> None:
    """Remove the archives of other first runs that ran at the same time. Safe while a JVM still writes one."""
    for other in archive.parent.glob(f"{archive.stem}.*.*"):
        other.unlink(missing_ok=True)


def note_classpath(flags: tuple[str, ...], classpath: str) -> None:
    """Record the class path of a JVM that a script starts with its own one: an archive fits exactly one class path."""
    for flag in flags:
        if flag.startswith(_LEARN):
            Path(flag.removeprefix(_LEARN)).with_suffix(".classpath").write_text(classpath)


def _folder(who: Account | None) -> Path:
    folder = cache_folder() / f"classes-{who.uid if who else os.geteuid()}"
    if not folder.is_dir():
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        set_owner(folder, who)
    return folder


def _fingerprint(runtime: Path, classpath: str) -> str:
    release = runtime.parent.parent / "release"
    text = f"{runtime}\n{release.read_text() if release.is_file() else ''}\n{classpath}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _adopt_archive(runtime: Path, archive: Path, classpath: str) -> bool:
    """Use the archive that an earlier run wrote. The JVM refuses an incomplete file."""
    for candidate in archive.parent.glob(f"{archive.stem}.*.new"):
        noted = candidate.with_suffix(".classpath")
        used = noted.read_text() if noted.is_file() else classpath
        test = [str(runtime), f"-XX:SharedArchiveFile={candidate}", "-Xshare:on", "-cp", used, "-version"]
        if subprocess.run(test, capture_output=True, check=False).returncode == 0:
            with contextlib.suppress(FileNotFoundError):  # another start has renamed it, or removed it beside its own
                candidate.rename(archive)
            return archive.is_file()
    return False

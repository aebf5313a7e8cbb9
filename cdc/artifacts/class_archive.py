"""Class archives of the JVM: classes kept as they were when a run ended, so that the next one starts with half the CPU.

The first run of a program writes its archive when it ends (a few seconds, once) under a name of its own; the next
start tries that file and takes it over if the JVM accepts it. A JVM that finds no archive, or one that does not fit,
just starts slower; so it does where the cache cannot be written.
"""

import hashlib
import os
import secrets
import subprocess
from pathlib import Path

from cdc.artifacts.account import Account, give
from cdc.artifacts.folders import cache_folder

_LEARN = "-XX:ArchiveClassesAtExit="


def class_archive(
    runtime: Path, name: str, classpath: str, who: Account | None, *, learn: bool = True
) -> tuple[str, ...]:
    """JVM flags that use the archive of this program, runtime and class path, or write one if `learn`.

    `who` runs the JVM and owns the folder of the archives: nobody may prepare classes for another user.
    """
    try:
        folder = _folder(who)
    except OSError:
        return ()
    archive = folder / f"{name}-{_fingerprint(runtime, classpath)}.jsa"
    if archive.is_file() or _take_over(runtime, archive, classpath):
        _forget_others(archive)
        return (f"-XX:SharedArchiveFile={archive}", "-Xlog:disable")
    if not learn or (who is None and not os.access(folder, os.W_OK)):
        return ()
    return (f"{_LEARN}{archive.with_suffix('')}.{secrets.token_hex(4)}.new", "-Xlog:disable")


def _forget_others(archive: Path) -> None:
    """Several first runs at once write several: one is enough. A JVM that is still writing does not mind."""
    for other in archive.parent.glob(f"{archive.stem}.*.*"):
        other.unlink(missing_ok=True)


def note_classpath(flags: tuple[str, ...], classpath: str) -> None:
    """For a JVM that somebody else starts with a class path of his own: an archive fits exactly one."""
    for flag in flags:
        if flag.startswith(_LEARN):
            Path(flag.removeprefix(_LEARN)).with_suffix(".classpath").write_text(classpath)


def _folder(who: Account | None) -> Path:
    folder = cache_folder() / f"classes-{who.uid if who else os.geteuid()}"
    if not folder.is_dir():
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        give(folder, who)
    return folder


def _fingerprint(runtime: Path, classpath: str) -> str:
    release = runtime.parent.parent / "release"
    text = f"{runtime}\n{release.read_text() if release.is_file() else ''}\n{classpath}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _take_over(runtime: Path, archive: Path, classpath: str) -> bool:
    """Adopt what an earlier run has written; a file that is half written is refused by the JVM."""
    for candidate in archive.parent.glob(f"{archive.stem}.*.new"):
        noted = candidate.with_suffix(".classpath")
        used = noted.read_text() if noted.is_file() else classpath
        test = [str(runtime), f"-XX:SharedArchiveFile={candidate}", "-Xshare:on", "-cp", used, "-version"]
        if subprocess.run(test, capture_output=True, check=False).returncode == 0:
            candidate.rename(archive)
            return True
    return False

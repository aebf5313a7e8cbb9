"""Class archives of the JVM: loaded classes kept over runs, so that a server starts with less CPU."""

from pathlib import Path

from deploy.local.account import account, give
from deploy.local.folders import cache_folder
from deploy.local.java import version_of


def class_archive(runtime: Path, name: str) -> tuple[str, ...]:
    """Flags that use the archive of this program and runtime, and write it when the server ends for the first time.

    Java 19 and newer keep it right by themselves; on 17 and 18 there is none, which only costs time.
    """
    if version_of(runtime) < 19:
        return ()
    folder = cache_folder() / "classes"
    if not folder.is_dir():
        folder.mkdir(mode=0o755, exist_ok=True)
        give(folder, account())
    file = folder / f"{name}-java{version_of(runtime)}.jsa"
    return ("-XX:+AutoCreateSharedArchive", f"-XX:SharedArchiveFile={file}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")

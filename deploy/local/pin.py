"""Writes `pins.yaml`: downloads every set of files and records their SHA-256. Run it after changing a version.

    python -m deploy.local.pin

Later downloads are verified against this file: review the difference before you commit it.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from cdc.artifacts import jars, maven, wheels
from cdc.artifacts.downloads import PINS, digest_of
from deploy.local import connect, kafka, opensearch, postgres_versions
from deploy.local.cluster import s3

_PYTHONS = ("3.11", "3.12")
_MACHINES = ("x86_64", "aarch64")
_HEADING = "# file name: SHA-256, by set. Written by `python -m deploy.local.pin`.\n"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _sets() -> Mapping[str, Callable[[Path], None]]:
    return {
        opensearch.SET: lambda folder: maven.copy(opensearch.ARTIFACT, folder, _say),
        kafka.SET: lambda folder: maven.copy_dependencies(kafka.POM, folder, _say),
        connect.SET: lambda folder: maven.copy_dependencies(connect.POM, folder, _say),
        connect.PLUGIN: lambda folder: maven.copy(connect.ARTIFACT, folder, _say, plugin=connect.OLD_PLUGIN),
        s3.SET: lambda folder: maven.copy(s3.ARTIFACT, folder, _say),
        **{name: _copier(artifact) for name, artifact in postgres_versions.SETS.items()},
        jars.SET: lambda folder: maven.copy_dependencies(jars.POM, folder, _say),
        **{wheel: _wheels_of(wheel) for wheel in wheels.VERSIONS},
    }


def _copier(artifact: str) -> Callable[[Path], None]:
    return lambda folder: maven.copy(artifact, folder, _say)


def _wheels_of(wheel: str) -> Callable[[Path], None]:
    """Downloads the wheels of every platform; skips platforms without one."""

    def fetch(folder: Path) -> None:
        for python in _PYTHONS:
            for machine in _MACHINES:
                tags = [f"--platform=manylinux{age}_{machine}" for age in ("2014", "_2_17", "_2_28")]
                only = ["--only-binary=:all:", "--no-deps", f"--python-version={python}", *tags, "--dest", str(folder)]
                wanted = f"{wheel}=={wheels.VERSIONS[wheel]}"
                command = [sys.executable, "-m", "pip", "download", "--quiet", *only, wanted]
                subprocess.run(command, check=False, stderr=subprocess.DEVNULL)

    return fetch


def main() -> None:
    """Download everything and write the file."""
    pins = {}
    for name, fetch in _sets().items():
        with tempfile.TemporaryDirectory() as folder:
            fetch(Path(folder))
            pins[name] = {path.name: digest_of(path) for path in sorted(Path(folder).iterdir())}
    PINS.write_text(_HEADING + yaml.safe_dump(pins, width=200))


if __name__ == "__main__":
    main()

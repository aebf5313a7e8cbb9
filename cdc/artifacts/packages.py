"""Installs missing packages with apt, without starting or changing any service of the system."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cdc.artifacts.progress import Report
from cdc.errors import EnvironmentFault

_POLICY = Path("/usr/sbin/policy-rc.d")
"""Every Debian package runs this script before it starts a service; exit code 101 forbids the start."""


def install(names: Sequence[str], what: str, report: Report) -> None:
    """Install packages by name. Raises EnvironmentFault, which names the packages, if that is not possible."""
    remedy = f"Install it: apt-get install {' '.join(names)}"
    prefix = _root_command()
    if prefix is None or shutil.which("apt-get") is None:
        raise EnvironmentFault(f"{what} is missing on this machine.", remedy)
    report(f"installing {' '.join(names)} with apt")
    try:
        _apt_install(prefix, names)
    except subprocess.CalledProcessError:
        raise EnvironmentFault(f"{what} is missing on this machine, and apt could not install it.", remedy) from None


def _root_command() -> list[str] | None:
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        return None
    allowed = subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    return ["sudo", "-n"] if allowed else None


def _apt_install(prefix: list[str], names: Sequence[str]) -> None:
    settings = ("env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1")
    apt = [*prefix, *settings, "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    with services_forbidden(prefix):
        subprocess.run([*apt, "update"], capture_output=True, check=False)
        subprocess.run([*apt, "install", "-y", "--no-install-recommends", *names], capture_output=True, check=True)


@contextlib.contextmanager
def services_forbidden(prefix: list[str]) -> Iterator[None]:
    """Install the policy script temporarily. Leaves an existing policy unchanged."""
    if _POLICY.exists():
        yield
        return
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        script.write("#!/bin/sh\nexit 101\n")
        script.flush()
        subprocess.run([*prefix, "install", "-m", "755", script.name, str(_POLICY)], check=True)
    try:
        yield
    finally:
        subprocess.run([*prefix, "rm", "-f", str(_POLICY)], check=False)

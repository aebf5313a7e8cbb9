"""What one executor of a cluster can see and import. Runs in a task: imports nothing but the standard library, so that
it can report which package an executor lacks."""

import importlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Marker:
    """A file that the driver has put into a folder; executors `write` beside it if they must write there too."""

    path: str
    text: str
    write: bool


@dataclass(frozen=True, slots=True)
class Sight:
    """What one executor's Python found: folders that it cannot use, modules that it cannot import, and why."""

    host: str
    executor: str
    python: str
    hidden: tuple[tuple[str, str], ...]
    missing: tuple[tuple[str, str], ...]


def look(markers: Sequence[Marker], modules: Sequence[str]) -> Iterator[Sight]:
    """One answer for this task."""
    hidden = tuple((marker.path, reason) for marker in markers if (reason := _unusable(marker)))
    missing = tuple((module, reason) for module in modules if (reason := _not_importable(module)))
    yield Sight(socket.gethostname(), os.getcwd(), sys.executable, hidden, missing)  # noqa: PTH109 -- as text


def _unusable(marker: Marker) -> str:
    path = Path(marker.path)
    try:
        if path.read_text(encoding="ascii") != marker.text:
            return "another file is there"
        if marker.write:
            own = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
            own.touch(exist_ok=False)
            own.unlink()
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _not_importable(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return ""

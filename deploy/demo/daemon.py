"""`millrace run` as a child process, as users start it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cdc.config.settings import Settings
from cdc.errors import MillraceError
from cdc.service.observe.health import nested
from cdc.service.state import status


@contextmanager
def running(config: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the pipeline of a file, with its output appended to `output`; stop it cleanly at the end."""
    command = [sys.executable, "-m", "cdc.cli.main", "run", "--config", str(config)]
    with output.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def require_running(process: subprocess.Popen[bytes], settings: Settings, output: Path) -> None:
    """Raise MillraceError with the reason if the process has ended."""
    if process.poll() is not None:
        raise MillraceError(_reason(settings), f"See {output}")


def _reason(settings: Settings) -> str:
    for part in ("capture", "apply"):
        message = nested(status.read(settings.state, part), "error").get("message")
        if message:
            return f"{part}: {message}"
    return "millrace ended before it was asked to."

"""How a part of the daemon starts and ends: settings, logging, signals, exit codes.

A part exits with 0 when it was asked to stop, with an error's own exit code when it must not continue, and with
TRY_AGAIN when a restart may help.
"""

import argparse
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

import cdc.log
from cdc import log_output
from cdc.config.pipeline_file import load
from cdc.config.secret import Secret
from cdc.config.settings import Settings
from cdc.errors import MillraceError
from cdc.fence import guard, start
from cdc.service.daemon import signals
from cdc.service.state import status
from sinks import registry
from views import registry as view_registry

TRY_AGAIN = 75
LOG_SECONDS = 5.0
"""How long to wait for the log's server. Short: a user waits for the answer, or a part reports the error and is
restarted."""
STOP_SECONDS = 45.0
"""After this a part that was asked to stop kills itself, in case its supervisor is gone. Longer than the supervisor's
own deadline."""
ORPHAN_SECONDS = 2.0
"""The same where the supervisor is gone: a batch usually ends in this time, and the next daemon waits for the locks of
this process. A batch that is cut off is applied again."""
SUPERVISOR = "MILLRACE_SUPERVISOR"
"""The environment variable with the pid of the process that started a part."""
_PR_SET_PDEATHSIG = 1
SettingsChange = Callable[[], Settings | None]
"""Returns the new settings after a reload was requested, else None."""
Run = Callable[[Settings, threading.Event, SettingsChange], None]

_log = logging.getLogger(__name__)


def settings_from(path: Path) -> Settings:
    """Load a pipeline file, with every installed kind of log and sink."""
    return load(path, cdc.log.settings_kinds(), registry.settings_kinds(), views=view_registry.settings_kinds())


def secrets_in(settings: BaseModel) -> Iterator[Secret]:
    """Every secret of a pipeline, to be redacted in log lines."""
    for _, value in settings:
        yield from _secrets(value)


def _secrets(value: object) -> Iterator[Secret]:
    if isinstance(value, Secret):
        yield value
    elif isinstance(value, BaseModel):
        yield from secrets_in(value)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _secrets(item)


def end_with_parent() -> None:
    """Have the kernel stop this process when its parent ends, even by kill -9.

    The trap: the kernel sends nothing if the parent ended before this call, while Python was still starting.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if _is_orphan():
        raise SystemExit(TRY_AGAIN)


def _is_orphan() -> bool:
    return os.environ.get(SUPERVISOR, str(os.getppid())) != str(os.getppid())


def main(part: str, run: Run) -> int:
    """Run a part until SIGTERM or SIGINT; returns its exit code."""
    end_with_parent()
    if not start.await_start():
        return 0
    guard.watch()
    parser = argparse.ArgumentParser(prog=f"millrace {part}")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--log-format", choices=("console", "json"), default="console")
    parser.add_argument("--log-level", default="INFO")
    options = parser.parse_args()
    log_output.configure(part, options.log_format, options.log_level)
    stop, again = threading.Event(), threading.Event()
    signals.set_on_signal({signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: again})
    threading.Thread(target=_kill_if_late, args=(part, stop), name="deadline", daemon=True).start()
    settings: Settings | None = None
    try:
        settings = settings_from(options.config)
        log_output.configure(part, options.log_format, options.log_level, secrets_in(settings))
        cdc.log.check_server(settings, LOG_SECONDS)
        run(settings, stop, _news(options.config, again))
    except MillraceError as error:
        return _report(part, settings, error)
    except Exception:
        _log.exception("%s ended unexpectedly", part)
        return TRY_AGAIN
    return 0


def _kill_if_late(part: str, stop: threading.Event) -> None:
    """Kill this process if it was asked to stop and does not: its supervisor may be gone."""
    stop.wait()
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if _is_orphan():
            time.sleep(ORPHAN_SECONDS)
            break
    _log.critical("%s did not stop in time and kills itself; nothing is lost, its batch is applied again", part)
    if os.getpgrp() == os.getpid():  # Spark's processes too
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _news(config: Path, asked: threading.Event) -> SettingsChange:
    """Reads the file again after SIGHUP. An invalid file changes nothing: the daemon has reported it."""

    def news() -> Settings | None:
        if not asked.is_set():
            return None
        asked.clear()
        try:
            return settings_from(config)
        except MillraceError as error:
            _log.error("The changed pipeline file is not used: %s", error)
            return None

    return news


def _report(part: str, settings: Settings | None, error: MillraceError) -> int:
    _log.error("%s", error)
    if settings is not None:
        failure = {"message": error.message, "remedy": error.remedy, "transient": error.transient}
        facts = {**status.read(settings.state, part), "state": "failed", "error": failure}
        with suppress(OSError):  # a full disk must not turn a transient error into a final one
            status.publish(settings.state, part, facts)
    return TRY_AGAIN if error.transient else error.exit_code

"""`millrace run`: the lock, the endpoint and the supervised parts."""

import logging
import signal
import threading
from pathlib import Path
from types import FrameType

from cdc import logs
from cdc.service.http import Server
from cdc.service.part import secrets_in, settings_from
from cdc.service.supervisor import StateLock, Supervisor, parts_of

_log = logging.getLogger(__name__)


def run(config: Path, log_format: logs.LogFormat, log_level: str) -> int:
    """Run a pipeline until SIGTERM or SIGINT; returns the exit code."""
    settings = settings_from(config)
    logs.configure("daemon", log_format, log_level, secrets_in(settings))
    stop = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    with StateLock(settings.state), Server(settings):
        _log.info("health on http://%s:%d/readyz", settings.http.host, settings.http.port)
        return Supervisor(parts_of(config, log_format, log_level)).run(stop)

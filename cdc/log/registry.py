"""The kinds of log. A kind is `cdc/log/<kind>.py`, or `cdc/log/<kind>/log.py`, and defines `KIND: LogKind`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

from cdc.discovery import Kinds, modules_that_define
from cdc.errors import ConfigError
from cdc.ports import LogReader, LogWriter

if TYPE_CHECKING:  # importing pydantic takes 0.2 s in each Spark worker
    from cdc.config.settings import LogSettings, Settings


@dataclass(frozen=True, slots=True)
class LogKind:
    """One kind of log: its settings, and how it is opened."""

    settings: "type[LogSettings]"
    open_writer: "Callable[[Settings], LogWriter]"
    open_reader: "Callable[[Settings], LogReader]"
    check_server: "Callable[[Settings, float], None]" = lambda _settings, _seconds: None
    """Raises LogError, which names the server, if the log's server does not answer within so many seconds."""


def kinds() -> Mapping[str, LogKind]:
    """Every kind by the name of its module. A new kind needs only a new file."""
    return Kinds(_modules(), lambda module: cast("LogKind", module.KIND))


def settings_kinds() -> Mapping[str, "type[LogSettings]"]:
    """What `cdc.config.pipeline_file.load` needs to check the `log` section."""
    return Kinds(_modules(), lambda module: cast("LogKind", module.KIND).settings)


@cache
def _modules() -> Mapping[str, str]:
    return modules_that_define("KIND", importlib.import_module(__name__.rpartition(".")[0]), "log")


def open_writer(settings: "Settings") -> LogWriter:
    """The writer of the configured log. Raises LogFenced while another process is the writer."""
    return _kind(settings).open_writer(settings)


def open_reader(settings: "Settings") -> LogReader:
    """A reader of the configured log; works before the writer has ever run."""
    return _kind(settings).open_reader(settings)


def check_server(settings: "Settings", seconds: float) -> None:
    """Check that the log's server, if it has one, answers in time. For commands, which wait less than a daemon.

    Raises LogError, which names the server and the remedy.
    """
    _kind(settings).check_server(settings, seconds)


def _kind(settings: "Settings") -> LogKind:
    name = settings.log.kind
    if name not in kinds():
        raise ConfigError(f"log.kind {name!r} is not known.", f"Known kinds: {', '.join(sorted(kinds()))}.")
    return kinds()[name]

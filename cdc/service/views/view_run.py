"""What the views process needs of a view that runs. `cdc.service.views.engine` provides it."""

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from cdc.config.settings import Settings, ViewSettings
from cdc.errors import ConfigError
from cdc.ports import LogReader


class ViewRun(Protocol):
    """One view, from its state in the state folder to its output folder (`views.output_files`).

    It is registered in the log as consumer `view.<name>` before it reads. It commits there the offset from which it
    would read again after a crash, which is that of the log's mark `view.<name>`, and the LSN that its rows in the log
    reflect, which may be greater: changes that do not concern it leave the mark where it is. It looks at
    `OutputFolder.asked_to_emit_again` in `step`, and then hands over its whole content, as rows with op `r` and their
    own versions. All methods but `facts` are called from one thread.
    """

    def step(self) -> bool:
        """Process one batch of the log; False: there is nothing to do now. Returns soon after `stop` was set.

        Raises MillraceError. If it is transient, the view is closed and opened again after a while; otherwise only once
        its definition changes or a user resumes it.
        """

    def facts(self) -> Mapping[str, object]:
        """For the status, from any thread, at any time, without waiting: `state` (loading, live, waiting), `lsn` (text,
        what its output reflects), `rows`, `state_bytes`, and what the kind of view has besides (`keys`, `late`,
        `watermark`, ...)."""

    def close(self) -> None:
        """Release files and connections. A crash without this call must be harmless."""


OpenView = Callable[[Settings, ViewSettings, LogReader, threading.Event], ViewRun]
"""Opens a view; `stop` is set when it is to end. Raises MillraceError."""


def view_named(settings: Settings, name: str) -> ViewSettings:
    """The view with this name, or of this table. Raises ConfigError."""
    found = next((view for view in settings.views if name in (view.name, str(view.table))), None)
    if found is None:
        names = ", ".join(view.name for view in settings.views)
        raise ConfigError(f"The pipeline has no view {name}.", f"Views: {names or 'none'}.")
    return found


def consumer_of(view: str) -> str:
    """The name under which a view is registered in the log."""
    return f"view.{view}"

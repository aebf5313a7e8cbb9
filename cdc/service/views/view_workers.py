"""All views of the pipeline: started and ended one by one, as the pipeline file requires."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from cdc.config.settings import Settings
from cdc.ports import LogReader
from cdc.service.state.pauses import Paused
from cdc.service.views.view_run import OpenView, consumer_of
from cdc.service.views.view_worker import ViewWorker
from views.dropped import is_dropped, remove_state
from views.output_files import OutputFolder

GRACE = 20.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ViewWorkers:
    """Every view of the pipeline. For one thread."""

    log: LogReader
    open_view: OpenView
    _workers: dict[str, ViewWorker] = field(default_factory=dict)
    _ending: dict[str, ViewWorker] = field(default_factory=dict)
    _dropped: dict[str, str] = field(default_factory=dict)
    """Dropped views by name, with their kinds."""
    _removed: set[str] = field(default_factory=set)
    _resumed: int | None = None

    def follow(self, settings: Settings, paused: Paused) -> None:
        """End views that were removed or changed, start missing ones, and try failed ones again if a user asked."""
        self._dropped = {view.name: view.kind for view in settings.views if is_dropped(settings.state, view.name)}
        wanted = {view.name: view for view in settings.views if view.name not in self._dropped}
        for name, worker in list(self._workers.items()):
            worker.follow(settings)
            if wanted.get(name) != worker.view:
                self._end(settings, name)
        self._ending = {name: worker for name, worker in self._ending.items() if not worker.join(0.0)}
        self._remove_dropped(settings)
        for name, view in wanted.items():
            if name not in self._workers and name not in self._ending:
                _log.info("view %s starts", name)
                self._workers[name] = ViewWorker(settings, view, self.log, self.open_view)
        if paused.resumed != (self._resumed if self._resumed is not None else paused.resumed):
            for worker in self._workers.values():
                worker.resume()
        self._resumed = paused.resumed

    def _remove_dropped(self, settings: Settings) -> None:
        """Once each dropped view has ended: the log need not keep anything for it, and its state is of no use."""
        self._removed &= self._dropped.keys()
        for name in self._dropped.keys() - self._workers.keys() - self._ending.keys() - self._removed:
            self.log.forget(consumer_of(name))
            remove_state(settings.state, name)
            self._removed.add(name)

    def facts(self) -> Mapping[str, Mapping[str, object]]:
        """By view, for the status."""
        gone = {name: {"state": "dropped", "kind": kind, "error": {}} for name, kind in self._dropped.items()}
        return {**{name: worker.facts() for name, worker in sorted(self._workers.items())}, **gone}

    def close(self) -> None:
        """End all views; each finishes its step."""
        for worker in self._workers.values():
            worker.end()
        for worker in (*self._workers.values(), *self._ending.values()):
            worker.join(GRACE)

    def _end(self, settings: Settings, name: str) -> None:
        _log.info("view %s ends and keeps its state and position", name)
        worker = self._ending[name] = self._workers.pop(name)
        worker.end()
        OutputFolder(settings.state, name).ask_for_ticks(0.0)

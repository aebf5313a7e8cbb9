"""The views of a pipeline, compared in the stores with what the source's tables say."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import cdc.log
from cdc.config.settings import Settings, SinkSettings, ViewSettings
from cdc.errors import ConfigError
from cdc.ports import LogReader, Sink
from cdc.service.views.catalog import catalog_of
from snapshots.verify.comparison import Differences, WaitFor
from snapshots.verify.view_comparison import verify_view
from views import registry
from views.dropped import is_dropped
from views.plan import ViewPlan


class VerifiedViews:
    """Views that can be computed from the tables alone. Windows cannot: they depend on the order of the log."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def of_sink(self, sink: SinkSettings, asked: Sequence[str]) -> Iterator[ViewSettings]:
        """The views of a sink that were asked for; all but dropped ones if none was named. Raises ConfigError for one
        that was named and cannot be compared."""
        for view in self._settings.views:
            if view.table not in self._settings.tables_of(sink) or (asked and str(view.table) not in asked):
                continue
            if is_dropped(self._settings.state, view.name):
                continue
            if self._plan(view).referee is not None:
                yield view
            elif asked:
                raise ConfigError(
                    f"View {view.name} cannot be computed from the tables alone: it depends on the order of the log.",
                    "Leave it out: name the tables and views to compare with --table.",
                )

    def verify(self, view: ViewSettings, sink: Sink, wait: WaitFor) -> Differences:
        """Compare one view in one store."""
        plan = self._plan(view)
        assert plan.referee is not None
        recorded = [schema for schema in self._log.schemas.newest() if schema.table == view.table]
        schema = recorded[0] if recorded else plan.schema
        return verify_view(self._settings.source, plan.columns, plan.referee, schema, sink, wait=wait)

    @cached_property
    def _log(self) -> LogReader:
        return cdc.log.open_reader(self._settings)

    def _plan(self, view: ViewSettings) -> ViewPlan:
        return registry.plan_of(view, catalog_of(self._settings, view, self._log))

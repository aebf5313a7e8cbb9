"""Checks views against the captured tables, without running them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cdc.capture.source.connect import connect
from cdc.config.settings import Settings, ViewSettings
from cdc.errors import ConfigError, MillraceError, SourceRefused
from cdc.model import TableSchema
from cdc.ports import LogReader
from cdc.service.views.catalog import current_catalog
from snapshots.tables.rows import describe, masking_of
from views import registry
from views.catalog import Catalog
from views.plan import ViewPlan


@dataclass(frozen=True, slots=True)
class CheckedView:
    """A view with its plan, or with what is wrong with it."""

    view: ViewSettings
    plan: ViewPlan | None
    error: MillraceError | None = None


def checked_views(settings: Settings, views: Sequence[ViewSettings], log: LogReader) -> list[CheckedView]:
    """Each view with its plan or its error. Raises SourceLost if the source cannot be asked."""
    catalog = whole_catalog(settings, log) if views else Catalog({})
    return [_checked(view, catalog) for view in views]


def _checked(view: ViewSettings, catalog: Catalog) -> CheckedView:
    try:
        return CheckedView(view, registry.plan_of(view, catalog))
    except ConfigError as error:
        return CheckedView(view, None, error)


def whole_catalog(settings: Settings, log: LogReader) -> Catalog:
    """The catalog now; a table that the log does not have yet is described by the source."""
    found = current_catalog(settings, log)
    missing = [table for table in settings.source.tables if table.name not in found.schemas]
    described: list[TableSchema] = []
    if missing:
        with connect(settings.source) as connection:
            for table in missing:
                with suppress(SourceRefused):  # it does not exist: the view that needs it says so
                    described.append(describe(connection, table, masking_of(settings.source)).layout.schema)
    schemas = {**found.schemas, **{schema.table: schema for schema in described}}
    return replace(found, schemas=schemas, expected=frozenset())

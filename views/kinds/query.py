"""Queries: a SELECT over captured tables, kept up to date as they change.

Every process reads the settings; only planning needs DuckDB and the parser of SQL, so they are imported then.
"""

from typing import TYPE_CHECKING

from views.query.settings import QuerySettings

if TYPE_CHECKING:
    from views.catalog import Catalog
    from views.plan import ViewPlan

SETTINGS = QuerySettings


def plan(settings: QuerySettings, catalog: "Catalog") -> "ViewPlan":
    """The plan of a view. Raises ConfigError, which names the view and the place."""
    from views.query.plan import plan

    return plan(settings, catalog)

"""Windows: aggregates of a table's rows by event time, which stay right when rows come late or are corrected.

Every process reads the settings; only planning needs DuckDB and the parser of SQL, so they are imported then.
"""

from typing import TYPE_CHECKING

from views.windows.settings import WindowedSettings

if TYPE_CHECKING:
    from views.catalog import Catalog
    from views.plan import ViewPlan

SETTINGS = WindowedSettings


def plan(settings: WindowedSettings, catalog: "Catalog") -> "ViewPlan":
    """The plan of a view. Raises ConfigError, which names the view and the place."""
    from views.windows.plan import plan

    return plan(settings, catalog)

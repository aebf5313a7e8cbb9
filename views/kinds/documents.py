"""Documents: a row of a table with the rows that belong to it in other tables, as one nested row.

Every process reads the settings; only planning needs DuckDB and the parser of SQL, so they are imported then.
"""

from typing import TYPE_CHECKING

from views.documents.settings import DocumentSettings

if TYPE_CHECKING:
    from views.catalog import Catalog
    from views.plan import ViewPlan

SETTINGS = DocumentSettings


def plan(settings: DocumentSettings, catalog: "Catalog") -> "ViewPlan":
    """The plan of a view. Raises ConfigError, which names the view and the place."""
    from views.documents.plan import plan

    return plan(settings, catalog)

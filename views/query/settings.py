"""How a query is declared in the pipeline file."""

from typing import Literal

from cdc.config.settings import ViewSettings


class QuerySettings(ViewSettings):
    """The result of a SELECT over captured tables."""

    kind: Literal["query"] = "query"
    sql: str
    """One SELECT: joins by equal columns (inner, left, right, full), WHERE, GROUP BY, HAVING and aggregates. Every
    column of the result has a name."""
    key: tuple[str, ...] = ()
    """The columns of the result that identify a row. Default: the columns of GROUP BY, or the primary keys of all
    tables, which must then be selected."""

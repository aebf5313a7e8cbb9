"""How documents are declared in the pipeline file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cdc.config.settings import Section, TableField, ViewSettings


class IncludeSettings(Section):
    """A table whose rows are part of the document."""

    table: TableField
    """The table as schema.name."""
    name: str = ""
    """The member of the document; defaults to the table's name."""
    columns: tuple[str, ...] = ()
    """Columns to include; empty means all."""
    through: TableField | None = None
    """For many-to-many: the table that links the two."""
    match: dict[str, str] = Field(default_factory=dict)
    """Columns of this table and the columns of the outer table that they equal; empty: by the foreign key between
    them."""
    order_by: str = ""
    """The column that orders the array; empty: the key."""
    include: tuple[IncludeSettings, ...] = ()
    """Tables whose rows are part of this one's."""


class DocumentSettings(ViewSettings):
    """Rows of one table with the rows of other tables that belong to them, as nested JSON."""

    kind: Literal["documents"] = "documents"
    root: TableField
    """The table with one row per document, as schema.name."""
    columns: tuple[str, ...] = ()
    """Columns of the document; empty means all."""
    include: tuple[IncludeSettings, ...] = ()
    """Tables whose rows are part of the document."""

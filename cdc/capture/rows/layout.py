"""How rows of a table schema become images: which columns, under which names, with which renderer."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from cdc.arrays import Bools
from cdc.capture.rows.byte_spans import Block
from cdc.capture.rows.images import Cell, Template
from cdc.capture.rows.mask import NO_MASK, Masking
from cdc.capture.rows.types import Renderer
from cdc.model import Column, TableSchema


@dataclass(frozen=True, slots=True)
class Field:
    """One column of the images: its index among the source's columns, and its renderer."""

    index: int
    column: Column
    renderer: Renderer


@dataclass(frozen=True)
class RowLayout:
    """How rows of one schema become images. `schema` is the masked one, as in the registry.

    Without key columns (replica identity NOTHING) the whole row is the key.
    """

    schema: TableSchema
    width: int
    """The number of columns that the source sends, including those that the mask drops."""
    fields: tuple[Field, ...]
    keys: tuple[Field, ...]
    row: Template
    key: Template

    def rows(self, block: Block, absent: Sequence[Bools | None] | None = None) -> "pa.StringArray":
        """The row images of a block; a column is left out of the rows in which it is `absent`."""
        return _images(self.row, self.fields, block, absent)

    def key_images(self, block: Block) -> "pa.StringArray":
        """The key images of a block."""
        return _images(self.key, self.keys, block, None)


def lay_out(schema: TableSchema, masking: Masking = NO_MASK) -> RowLayout:
    """Apply the masking rules to a schema of the source. Raises ConfigError if they would drop or mask its key."""
    masked = masking.columns(schema)
    fields = tuple(Field(index, column, renderer) for index, column, renderer in masked)
    keys = tuple(field for field in fields if field.column.key) or fields
    recorded = TableSchema(
        schema.table, tuple(field.column for field in fields), schema.id, schema.oid, schema.identity
    )
    return RowLayout(recorded, len(schema.columns), fields, keys, _template(fields), _template(keys))


def recorded_as(layout: RowLayout, recorded: TableSchema) -> RowLayout:
    """The layout with the recorded schema; images leave out columns that this schema does not have."""
    known = {column.name for column in recorded.columns}
    fields = tuple(field for field in layout.fields if field.column.name in known)
    keys = tuple(field for field in fields if field.column.key) or fields
    return RowLayout(recorded, layout.width, fields, keys, _template(fields), _template(keys))


def images(layout: RowLayout, block: Block) -> "tuple[pa.StringArray, pa.StringArray]":
    """(key, after) of complete rows, for snapshots: the same code as for the stream."""
    return layout.key_images(block), layout.rows(block)


def _template(fields: Sequence[Field]) -> Template:
    return Template(tuple(field.column.name for field in fields), tuple(field.renderer.quoted for field in fields))


def _images(
    template: Template, fields: Sequence[Field], block: Block, absent: Sequence[Bools | None] | None
) -> "pa.StringArray":
    cells = [
        Cell(field.renderer.render(block.columns[field.index]), None if absent is None else absent[field.index])
        for field in fields
    ]
    return template.images(cells, block.data, block.count)

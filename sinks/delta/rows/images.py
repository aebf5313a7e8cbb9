"""Row images to typed Arrow columns of a Delta table. Pure. See `cdc.json_text.typed`."""

from collections.abc import Mapping

import pyarrow as pa

from cdc.arrays import AnyArray
from cdc.json_text import typed as json_objects
from cdc.json_text.typed import NO_OBJECT, Typed
from cdc.model import Column
from sinks.delta.schema.types import form

NOT_AN_OBJECT = "the row image is not a JSON object"


def typed(columns: Mapping[Column, pa.DataType], images: AnyArray) -> Typed:
    """Read JSON objects as columns of these types; `misfits` has the reason of each row that must not be written."""
    read = json_objects.typed({one.name: (type_, form(one, type_)) for one, type_ in columns.items()}, images)
    types = {one.name: type_ for one, type_ in columns.items()}
    return Typed(read.columns, {row: _reason(name, types) for row, name in read.misfits.items()}, read.absent)


def _reason(name: str, types: Mapping[str, pa.DataType]) -> str:
    return NOT_AN_OBJECT if name == NO_OBJECT else f"column {name}: value does not fit {type_name(types[name])}"


def type_name(type_: pa.DataType) -> str:
    """The name of a column's type as Delta and Spark write it."""
    if pa.types.is_decimal(type_):
        return f"decimal({type_.precision},{type_.scale})"
    if pa.types.is_timestamp(type_):
        return "timestamp" if type_.tz else "timestamp_ntz"
    return _NAMES.get(type_, str(type_))


_NAMES = {
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.bool_(): "boolean",
    pa.date32(): "date",
}

"""Postgres types for the column types that a connector's messages declare (converters with schemas on).

Only types whose JSON has the same form as in the log's row images; others get a type guessed from their JSON.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from cdc.model import PgType

_BY_NAME = {
    "io.debezium.data.Uuid": PgType(2950, "uuid"),
    "io.debezium.time.ZonedTimestamp": PgType(1184, "timestamptz"),
}
_BY_TYPE = {
    "boolean": PgType(16, "bool"),
    "int16": PgType(21, "int2"),
    "int32": PgType(23, "int4"),
    "int64": PgType(20, "int8"),
    "float": PgType(700, "float4"),
    "double": PgType(701, "float8"),
    "bytes": PgType(17, "bytea"),
}


def declared_types(schema: Mapping[str, Any]) -> dict[str, PgType]:
    """The known types among the columns that a value's schema declares. Never raises."""
    return {name: found for name, field in _columns(schema) if (found := _type(field)) is not None}


def _columns(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for image in schema.get("fields") or ():
        if image.get("field") == "after":
            for field in image.get("fields") or ():
                yield str(field.get("field")), field


def _type(field: Mapping[str, Any]) -> PgType | None:
    name = field.get("name")
    return _BY_NAME.get(str(name)) if name else _BY_TYPE.get(str(field.get("type")))

"""Which Delta type stores which Postgres type. Pure.

| Postgres | Delta | Arrow |
|---|---|---|
| smallint, integer, bigint | short, integer, long | int16, int32, int64 |
| oid, xid, cid | long | int64 |
| real, double precision | float, double | float32, float64 |
| boolean | boolean | bool |
| numeric(p,s), 0 <= s <= p <= 38 | decimal(p,s) | decimal128(p,s) |
| date | date | date32 |
| timestamp | timestamp_ntz | timestamp[us] |
| timestamptz | timestamp | timestamp[us, UTC] |
| bytea | binary | binary |
| json, jsonb, arrays | string: the JSON text | string |
| a domain | as its base type | |
| everything else, also numeric without precision | string: Postgres's text | string |

A value that does not fit never changes the type of its column: rows with `infinity`, BC dates, years beyond 9999 or NaN
in a decimal are rejected (see cdc.json_text.typed), because a reader of Delta could not distinguish them from
other values.
"""

import pyarrow as pa

from cdc.json_text.typed import ValueForm
from cdc.model import Column, PgType, TypeKind

MAX_PRECISION = 38
"""The limit of Delta, Spark and Arrow's decimal128."""

INSTANT = pa.timestamp("us", tz="UTC")


_PLAIN: dict[str, pa.DataType] = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "oid": pa.int64(),
    "xid": pa.int64(),
    "cid": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": INSTANT,
    "bytea": pa.binary(),
}

_JSON = frozenset({"json", "jsonb"})
_VECTORS = frozenset({"int2vector", "oidvector"})
"""Arrays by the catalog, but written as plain text."""


def root(type_: PgType) -> PgType:
    """The type below any number of domains."""
    while type_.kind is TypeKind.DOMAIN and type_.element is not None:
        type_ = type_.element
    return type_


def arrow_type(column: Column) -> pa.DataType:
    """The Arrow type of the column in the Delta table."""
    type_ = root(column.type)
    if type_.kind is not TypeKind.BASE:
        return pa.string()
    if type_.name == "numeric":
        return _decimal(column.modifier)
    return _PLAIN.get(type_.name, pa.string())


def _decimal(modifier: int) -> pa.DataType:
    """Postgres packs precision and an 11-bit signed scale into the modifier, offset by 4."""
    if modifier < 4:
        return pa.string()
    precision = (modifier - 4) >> 16 & 0xFFFF
    scale = ((modifier - 4) & 0x7FF ^ 1024) - 1024
    if 0 <= scale <= precision <= MAX_PRECISION:
        return pa.decimal128(precision, scale)
    return pa.string()


def form(column: Column, stored: pa.DataType) -> ValueForm:
    """How this column's JSON values are read into a column of the stored type."""
    type_ = root(column.type)
    if (type_.kind is TypeKind.ARRAY and type_.name not in _VECTORS) or type_.name in _JSON:
        return ValueForm.JSON
    if stored == pa.binary():
        return ValueForm.BASE64
    return ValueForm.CAST


_WIDER = {
    pa.int16(): (pa.int32(), pa.int64()),
    pa.int32(): (pa.int64(),),
    pa.float32(): (pa.float64(),),
}


def can_store(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a stored column can store every value of the wanted type without loss."""
    if stored == wanted or stored in _WIDER.get(wanted, ()):
        return True
    if pa.types.is_decimal(stored) and pa.types.is_decimal(wanted):
        whole = stored.precision - stored.scale >= wanted.precision - wanted.scale
        return bool(whole and stored.scale >= wanted.scale)
    return False


def widens(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether the wanted type can store every value of the stored one: the column can be rewritten without loss."""
    return can_store(wanted, stored)

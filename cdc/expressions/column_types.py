"""The DuckDB type of a Postgres column in expressions, and the Postgres type of an expression's value. Pure.

| Postgres | in expressions |
|---|---|
| smallint, integer, bigint; oid | SMALLINT, INTEGER, BIGINT; BIGINT |
| real, double precision | REAL, DOUBLE |
| numeric(p,s), 0 <= s <= p <= 38 | DECIMAL(p,s) |
| any other numeric | NUMERIC: can be compared and passed on, not calculated with |
| boolean, date, time, uuid | BOOLEAN, DATE, TIME, UUID |
| timestamp, timestamptz | TIMESTAMP, TIMESTAMPTZ |
| text, varchar, name, "char", enums | VARCHAR |
| char(n) | BPCHAR: compared without the blanks at its end |
| bytea | BLOB |
| json, jsonb | JSON |
| an array of these | the type with [] |
| a domain | as its base type |
| everything else | `TEXT OF <type>`: Postgres's text; can be passed on and cast to text |

NUMERIC and `TEXT OF …` are no types of DuckDB: it gets their texts, and `cdc.expressions.translation` decides what may
be done with them.
"""

import re

from cdc.model import Column, PgType, TableSchema, TypeKind

NUMERIC = "NUMERIC"
BPCHAR = "BPCHAR"
_OPAQUE = "TEXT OF "
MAX_PRECISION = 38

_PLAIN = {
    "int2": "SMALLINT",
    "int4": "INTEGER",
    "int8": "BIGINT",
    "oid": "BIGINT",
    "float4": "REAL",
    "float8": "DOUBLE",
    "bool": "BOOLEAN",
    "text": "VARCHAR",
    "varchar": "VARCHAR",
    "name": "VARCHAR",
    "char": "VARCHAR",
    "bpchar": BPCHAR,
    "uuid": "UUID",
    "date": "DATE",
    "time": "TIME",
    "timestamp": "TIMESTAMP",
    "timestamptz": "TIMESTAMPTZ",
    "bytea": "BLOB",
    "json": "JSON",
    "jsonb": "JSON",
}
_POSTGRES = {
    "TINYINT": PgType(21, "int2"),
    "SMALLINT": PgType(21, "int2"),
    "INTEGER": PgType(23, "int4"),
    "BIGINT": PgType(20, "int8"),
    "REAL": PgType(700, "float4"),
    "DOUBLE": PgType(701, "float8"),
    "BOOLEAN": PgType(16, "bool"),
    "VARCHAR": PgType(25, "text"),
    BPCHAR: PgType(25, "text"),
    "UUID": PgType(2950, "uuid"),
    "DATE": PgType(1082, "date"),
    "TIME": PgType(1083, "time"),
    "TIMESTAMP": PgType(1114, "timestamp"),
    "TIMESTAMPTZ": PgType(1184, "timestamptz"),
    "INTERVAL": PgType(1186, "interval"),
    "BLOB": PgType(17, "bytea"),
    "JSON": PgType(114, "json"),
    NUMERIC: PgType(1700, "numeric"),
}
_ARRAYS = {"int2": 1005, "int4": 1007, "int8": 1016, "float4": 1021, "float8": 1022, "bool": 1000, "text": 1009}
_DECIMAL = re.compile(r"DECIMAL\((\d+),\s*(\d+)\)")
_NAMES = {"TIMESTAMP WITH TIME ZONE": "TIMESTAMPTZ", "FLOAT": "REAL", "HUGEINT": "DECIMAL(38,0)", '"NULL"': "VARCHAR"}


def columns_of(schema: TableSchema) -> dict[str, str]:
    """The type of each column in expressions."""
    return {column.name: type_of(column.type, column.modifier) for column in schema.columns}


def type_of(type_: PgType, modifier: int = -1) -> str:
    """The type in expressions of a Postgres type."""
    if type_.kind is TypeKind.DOMAIN and type_.element is not None:
        return type_of(type_.element, modifier)
    if type_.kind is TypeKind.ENUM:
        return "VARCHAR"
    if type_.kind is TypeKind.ARRAY and type_.element is not None:
        element = type_of(type_.element, modifier)
        return _OPAQUE + type_.name if element == NUMERIC or is_opaque(element) else f"{element}[]"
    if type_.kind is not TypeKind.BASE:
        return _OPAQUE + type_.name
    if type_.name == "numeric":
        return _decimal(modifier)
    return _PLAIN.get(type_.name, _OPAQUE + type_.name)


def _decimal(modifier: int) -> str:
    """Postgres packs precision and an 11-bit signed scale into the modifier, offset by 4."""
    if modifier < 4:
        return NUMERIC
    precision = (modifier - 4) >> 16 & 0xFFFF
    scale = ((modifier - 4) & 0x7FF ^ 1024) - 1024
    return f"DECIMAL({precision},{scale})" if 0 <= scale <= precision <= MAX_PRECISION else NUMERIC


def is_opaque(type_: str) -> bool:
    """Whether expressions know only the text of such values."""
    return type_.startswith(_OPAQUE)


def postgres_name(type_: str) -> str:
    """The name of the Postgres type, for messages."""
    if is_opaque(type_):
        return type_.removeprefix(_OPAQUE)
    return type_.removesuffix("[]").lower() + ("[]" if type_.endswith("[]") else "")


def duckdb_name(type_: str) -> str:
    """The type under which DuckDB has values of this type."""
    return "VARCHAR" if type_ == NUMERIC or is_opaque(type_) else type_


def normal_name(described: str) -> str:
    """A type as this module names it, from DuckDB's own description."""
    element = described.removesuffix("[]")
    name = _NAMES.get(element, element.replace(", ", ","))
    return name + described[len(element) :]


def column_of(name: str, type_: str) -> Column:
    """A column of a Postgres type that has the values of this type: what a sink needs to know of a computed column."""
    if type_.endswith("[]"):
        element = column_of(name, type_.removesuffix("[]"))
        oid = _ARRAYS.get(element.type.name, 0)
        return Column(name, PgType(oid, f"_{element.type.name}", TypeKind.ARRAY, element.type), element.modifier)
    if found := _DECIMAL.fullmatch(type_):
        return Column(name, PgType(1700, "numeric"), (int(found[1]) << 16 | int(found[2])) + 4)
    return Column(name, _POSTGRES.get(type_, PgType(25, "text")))

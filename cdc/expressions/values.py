"""Row images as typed columns for DuckDB, and typed values as JSON again, byte-equal to what capture writes.

Arrow has the text of values whose DuckDB type it lacks or prints differently (uuid, time, JSON, arrays, numeric without
precision): `cdc.expressions.translation` casts them where an expression uses them.
"""

import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.expressions import engine
from cdc.expressions.column_types import NUMERIC, duckdb_name, is_opaque
from cdc.json_text import typed as json_objects
from cdc.json_text.columns import RawColumn
from cdc.json_text.quoted import all_quoted
from cdc.json_text.typed import Typed, ValueForm

_ARROW: Mapping[str, pa.DataType] = {
    "SMALLINT": pa.int16(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us"),
    "TIMESTAMPTZ": pa.timestamp("us", tz="UTC"),
    "BLOB": pa.binary(),
}
_DECIMAL = re.compile(r"DECIMAL\((\d+),(\d+)\)")
_QUOTED = ("VARCHAR", "BPCHAR", "UUID", "TIME")
_FIXED_DIGITS = {"REAL": 6, "DOUBLE": 15}
"""Postgres writes a float with more digits before the point with an exponent; DuckDB from 17 digits on."""


def arrow_type(type_: str) -> pa.DataType:
    """The Arrow type in which `typed` reads a column of this type."""
    if found := _DECIMAL.fullmatch(type_):
        return pa.decimal128(int(found[1]), int(found[2]))
    return _ARROW.get(type_, pa.string())


def typed(images: AnyArray, columns: Mapping[str, str]) -> pa.Table:
    """JSON objects as columns of these types; an absent member is null. Raises ValueError with the name of a column
    for a value that does not fit: `typed_or_misfits` says which rows."""
    read = typed_or_misfits(images, columns)
    if read.misfits:
        name = next(iter(read.misfits.values()))
        raise ValueError(f"column {name}: a value does not fit {columns.get(name, 'a JSON object')}")
    return pa.table(read.columns) if columns else pa.table({"none": pa.nulls(len(images))}).select([])


def typed_or_misfits(images: AnyArray, columns: Mapping[str, str]) -> Typed:
    """JSON objects as columns of these types, and the rows that have a value that does not fit."""
    return json_objects.typed({name: (arrow_type(type_), _form(type_)) for name, type_ in columns.items()}, images)


def typed_cells(cells: AnyArray, type_: str) -> AnyArray:
    """JSON texts of values of this type as a column; null for null. Raises ValueError for a value that does not fit."""
    found, misfits = json_objects.typed_cells(cells, arrow_type(type_), _form(type_))
    if misfits:
        raise ValueError(f"a value does not fit {type_}")
    return found


def typed_members(raw: Mapping[str, RawColumn], count: int, columns: Mapping[str, str]) -> Typed:
    """The same for objects whose members are known already."""
    wanted = {name: (arrow_type(type_), _form(type_)) for name, type_ in columns.items()}
    return json_objects.typed_members(wanted, raw, count)


def _form(type_: str) -> ValueForm:
    if type_ == "JSON" or type_.endswith("[]"):
        return ValueForm.JSON
    return ValueForm.BASE64 if type_ == "BLOB" else ValueForm.CAST


def json_cells(column: AnyArray, type_: str) -> AnyArray:
    """The JSON text of each value of this type, null for null. Values come from `typed` or from a program."""
    values: AnyArray = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_string(values.type):
        return text_cells(values, type_)
    connection = engine.cursor()
    connection.register("given", pa.table({"x": values}))
    query = f"SELECT {cell_sql('x', type_)} AS cell FROM given"  # noqa: S608  SQL of this module
    cells: AnyArray = connection.sql(query).to_arrow_table()["cell"].combine_chunks()
    return cells.cast(pa.string())


def json_value(sql: str, type_: str) -> str:
    """SQL for the JSON text of a value; for the value itself where that is a text: `text_cells` quotes it."""
    return f"CAST({sql} AS VARCHAR)" if _is_text(type_) else cell_sql(f"({sql})", type_)


def _is_text(type_: str) -> bool:
    return type_ in (*_QUOTED, "JSON") or duckdb_name(type_) == "VARCHAR"


def text_cells(values: AnyArray, type_: str) -> AnyArray:
    """JSON texts of what `json_value` gives."""
    if not _is_text(type_) and not type_.endswith("[]"):
        return values
    if type_ == "JSON" or type_.endswith("[]"):
        return values
    if type_ == NUMERIC:
        odd = pc.match_substring_regex(values, "^-?[^-0-9]")  # NaN and the infinities
        return pc.if_else(odd, all_quoted(values), values)
    return all_quoted(values)


def cell_sql(value: str, type_: str) -> str:
    """SQL that gives the JSON text of a value."""
    if type_.endswith("[]"):
        element = cell_sql("e", type_.removesuffix("[]"))
        return f"'[' || array_to_string(list_transform({value}, lambda e: coalesce({element}, 'null')), ',') || ']'"
    if type_ in _FIXED_DIGITS:
        return _float(value, type_)
    if type_ in _QUOTED or is_opaque(type_) or duckdb_name(type_) == "VARCHAR":
        return f"CAST(to_json(CAST({value} AS VARCHAR)) AS VARCHAR)"
    return _CELLS.get(type_, "CAST({} AS VARCHAR)").replace("{}", value)


def _float(value: str, type_: str) -> str:
    """A float in Postgres's digits."""
    digits = _FIXED_DIGITS[type_]
    fixed = f"regexp_replace(CAST(abs({value}) AS VARCHAR), '[.]0$', '')"
    mantissa = f"rtrim(replace({fixed}, '.', ''), '0')"
    exponent = f"length(split_part({fixed}, '.', 1)) - 1"
    scientific = (
        f"{mantissa}[1] || CASE WHEN length({mantissa}) > 1 THEN '.' ELSE '' END || {mantissa}[2:] || 'e+' || "
        f"lpad(CAST({exponent} AS VARCHAR), 2, '0')"
    )
    sign = f"CASE WHEN signbit({value}) THEN '-' ELSE '' END"
    return (
        f"CASE WHEN isnan({value}) THEN '\"NaN\"' "
        f"WHEN isinf({value}) THEN '\"' || {sign} || 'Infinity\"' "
        f"WHEN contains(CAST({value} AS VARCHAR), 'e') THEN CAST({value} AS VARCHAR) "
        f"WHEN abs({value}) >= 1e{digits} THEN {sign} || {scientific} ELSE {sign} || {fixed} END"
    )


_TIME = "CASE WHEN isfinite({}) THEN '\"' || replace(CAST({} AS VARCHAR), ' ', 'T') || '\"' "
_INSTANT = "CAST({} AT TIME ZONE 'UTC' AS VARCHAR)"
_PARTS = {
    "Y": "extract(year FROM {})",
    "M": "extract(month FROM {})",
    "D": "extract(day FROM {})",
    "H": "extract(hour FROM {})",
    "N": "extract(minute FROM {})",
}
_INTERVAL = (
    "CASE WHEN {} IS NULL THEN NULL WHEN {} = INTERVAL 0 SECOND THEN '\"PT0S\"' ELSE '\"P' || "
    + " || ".join(f"CASE WHEN {_PARTS[part]} <> 0 THEN {_PARTS[part]} || '{part}' ELSE '' END" for part in "YMD")
    + " || CASE WHEN to_microseconds(epoch_us({}) % 86400000000) <> INTERVAL 0 SECOND THEN 'T' ELSE '' END || "
    + " || ".join(
        f"CASE WHEN {_PARTS[part]} <> 0 THEN {_PARTS[part]} || '{'M' if part == 'N' else part}' ELSE '' END"
        for part in "HN"
    )
    + " || CASE WHEN extract(microsecond FROM {}) <> 0 THEN "
    + "rtrim(rtrim(CAST(CAST(extract(microsecond FROM {}) AS DECIMAL(18,6)) * 0.000001 AS VARCHAR), '0'), '.')"
    + " || 'S' ELSE '' END || '\"' END"
)
_CELLS = {
    "DATE": "'\"' || CAST({} AS VARCHAR) || '\"'",
    "TIMESTAMP": _TIME + "ELSE '\"' || CAST({} AS VARCHAR) || '\"' END",
    "TIMESTAMPTZ": f"CASE WHEN isfinite({{}}) THEN '\"' || replace({_INSTANT}, ' ', 'T') || 'Z\"' "
    f"ELSE '\"' || {_INSTANT} || '\"' END",
    "BLOB": "'\"' || base64({}) || '\"'",
    "JSON": "CAST({} AS VARCHAR)",
    "INTERVAL": _INTERVAL,
}

"""How a table becomes an index: its name, its fields, its documents' ids.

`_source` keeps the row exactly; the mapping only decides what can be searched. So a value that its field does not
accept (NaN, infinity, a date BC) is stored and not indexed, instead of refusing the row.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.json_text.columns import members as key_members
from cdc.json_text.members import members, quote, unquote
from cdc.model import Column, PgType, TableId, TableSchema, TypeKind

Field = Mapping[str, Any]

_KEYWORD: Field = {
    "type": "keyword",
    "ignore_above": 8191,
}  # OpenSearch refuses a document with a term of more than 32766 bytes
_TEXT: Field = {"type": "text", "fields": {"keyword": _KEYWORD}}
_DATE: Field = {"type": "date", "format": "strict_date_optional_time_nanos", "ignore_malformed": True}
_OPAQUE: Field = {"type": "object", "enabled": False}
_FIELDS: Mapping[str, Field] = {
    "int2": {"type": "short"},
    "int4": {"type": "integer"},
    "int8": {"type": "long"},
    "oid": {"type": "long"},
    "float4": {"type": "float", "ignore_malformed": True},
    "float8": {"type": "double", "ignore_malformed": True},
    # the keyword has every digit; the double is for ranges and sums
    "numeric": {**_KEYWORD, "fields": {"number": {"type": "double", "ignore_malformed": True}}},
    "bool": {"type": "boolean"},
    "date": _DATE,
    "timestamp": _DATE,
    "timestamptz": _DATE,
    "text": _TEXT,
    "varchar": _TEXT,
    "citext": _TEXT,
    "bytea": {"type": "binary"},
    # accepts any JSON: flat_object refuses scalars, a dynamic object refuses a change of type
    "json": _OPAQUE,
    "jsonb": _OPAQUE,
}

_ALLOWED = re.compile(r"[a-z0-9][a-z0-9._-]{0,200}")
_LONGEST_ID = 512
_HASHED = "sha256:"


def index_name(prefix: str, table: TableId) -> str:
    """A name that OpenSearch accepts. A hash of the true name makes a name unique that had to be changed.

    The same for a schema with a dot: `"a.b".c` would have the name of `a."b.c"`.
    """
    plain = f"{prefix}{table.schema}.{table.name}"
    true = plain if "." not in table.schema else f"{prefix}{table}"
    if true == plain and _ALLOWED.fullmatch(plain):
        return plain
    safe = re.sub(r"[^a-z0-9._-]", "-", plain.lower()).lstrip("._-")[:180]
    return f"{safe}-{hashlib.sha256(true.encode()).hexdigest()[:8]}"


def id_prefix(table: TableId) -> str:
    """What the ids of a table's documents begin with in an index of several tables: no two tables have the same."""
    return str(table).replace("%", "%25").replace("/", "%2F") + "/"


def mapping(schema: TableSchema, overrides: Mapping[str, Field], metadata: str, shared: bool = False) -> dict[str, Any]:
    """The properties of a table's index; `overrides` has fields by column. `shared`: documents name their table."""
    fields = {column.name: dict(overrides.get(column.name) or field_of(column.type)) for column in schema.columns}
    return {**fields, metadata: _SHARED_METADATA if shared else _METADATA}


_METADATA: Field = {
    "dynamic": False,
    "properties": {"version": {"type": "long"}, "deleted": {"type": "boolean"}, "at": _DATE},
}


_SHARED_METADATA: Field = {**_METADATA, "properties": {**_METADATA["properties"], "table": {"type": "keyword"}}}


def field_of(kind: PgType) -> Field:
    """The field for a Postgres type. An array has the field of its element: a field can have many values."""
    if kind.kind in (TypeKind.ARRAY, TypeKind.DOMAIN) and kind.element:
        return field_of(kind.element)
    return _FIELDS.get(kind.name, _KEYWORD)


def column_problem(column: Column, metadata: str) -> str:
    """Why a column cannot be a field of a document; empty if it can."""
    if column.name == metadata:
        return f"has the name of the field with the version; choose another `metadata` than {metadata!r}"
    if column.name in _RESERVED:
        return "has a name that OpenSearch reserves; exclude it with the table's `columns`"
    return ""


_RESERVED = {"_id", "_index", "_source", "_routing", "_version", "_seq_no", "_ignored", "_field_names", "_type", ""}


def document_id(key: str, prefix: str = "") -> str:
    """A document's `_id`: the value of a single key column, a JSON array of several, a hash if that is too long.
    `prefix` comes first in an index of several tables.

    A null differs from the text 'null'; only a table without a key, where the whole row is the key, has nulls in it.
    """
    values = list(members(key).values())
    if values == ["null"]:
        return _HASHED + hashlib.sha256(prefix.encode() + b"\0null").hexdigest()
    text = prefix + (unquote(values[0]) if len(values) == 1 else "[" + ",".join(values) + "]")
    if 0 < len(text.encode()) <= _LONGEST_ID and not text.startswith(_HASHED):
        return text
    return _HASHED + hashlib.sha256(text.encode()).hexdigest()


def document_ids(keys: AnyArray, prefix: str = "") -> AnyArray:
    """`document_id` of many keys."""
    columns = list(key_members(keys).values())
    if len(columns) == 1:
        ids = columns[0].text().cast(pa.string()).fill_null("")
    elif columns:
        parts = [column.json().cast(pa.string()).fill_null("null") for column in columns]
        ids = pc.binary_join_element_wise("[", pc.binary_join_element_wise(*parts, ","), "]", "")
    else:
        ids = pa.repeat("", len(keys))
    if prefix:
        return _prefixed_ids(keys, ids, prefix)
    size = pc.binary_length(ids)
    short = pc.and_(pc.greater(size, pa.scalar(0)), pc.less_equal(size, pa.scalar(_LONGEST_ID)))
    odd = pc.or_(pc.invert(short), pc.starts_with(ids, _HASHED))
    if not pc.any(odd).as_py():
        return ids
    return pc.replace_with_mask(ids, odd, pa.array([document_id(key) for key in keys.filter(odd).to_pylist()]))


def _prefixed_ids(keys: AnyArray, ids: AnyArray, prefix: str) -> AnyArray:
    """Ids of an index of several tables; a table whose whole row is the key has nulls in it, and is made row by row."""
    prefixed = pc.binary_join_element_wise(prefix, ids, "")
    odd = pc.or_(pc.greater(pc.binary_length(prefixed), pa.scalar(_LONGEST_ID)), pc.equal(ids, pa.scalar("")))
    odd = pc.or_(odd, pc.starts_with(prefixed, _HASHED))
    if not pc.any(odd).as_py():
        return prefixed
    return pc.replace_with_mask(
        prefixed, odd, pa.array([document_id(key, prefix) for key in keys.filter(odd).to_pylist()])
    )


def raw_document_id(key: str, prefix: str = "") -> bytes:
    """`document_id` as JSON, for the body of a request."""
    if prefix:
        return quote(document_id(key, prefix)).encode()
    plain = _PLAIN_KEY.fullmatch(key)
    text = plain[1] or plain[2] if plain else _HASHED
    return quote(document_id(key)).encode() if text.startswith(_HASHED) else f'"{text}"'.encode()


# One column with a short text without escapes or an integer, as almost every key has: a tenth of the cost. 128
# characters are at most 512 bytes.
_PLAIN_KEY = re.compile(r'\{"[^"\\]*":(?:"([^"\\]{1,128})"|(-?[0-9]{1,40}))\}')

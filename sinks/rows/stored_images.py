"""Rows of the JSON stores as `verify` compares them: the store's key of a row, and the row arranged by the schema.

Everything works on whole columns: a table of a million rows costs a few microseconds of CPU for each. One regular
expression finds the rows that are as the log writes them; only the others are parsed.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.json_text.columns import Malformed, members
from cdc.json_text.members import quote
from cdc.model import TableSchema
from sinks.rows.images import IMAGES, arranged

_STRING = r'"(?:[^"\\]|\\.)*"'
_ATOM = r'[^",\[\]{}\s]+'
_FLAT = rf'[\[{{](?:[^"\[\]{{}}]|{_STRING})*[\]}}]'
_VALUE = rf'(?:{_STRING}|{_ATOM}|[\[{{](?:[^"\[\]{{}}]|{_STRING}|{_FLAT})*[\]}}])'
"""A JSON value, nested at most twice; rows with deeper ones are parsed, which is slower."""


def images_table(keys: AnyArray, rows: AnyArray) -> pa.Table:
    """A piece of IMAGES."""
    return pa.table([keys.cast(pa.string()), rows.cast(pa.string())], schema=IMAGES)


def in_key_order(pieces: Iterable[pa.Table]) -> pa.Table:
    """The pieces as one table ordered by key."""
    whole = pa.concat_tables([IMAGES.empty_table(), *pieces]).combine_chunks()
    return whole.take(pc.sort_indices(whole, sort_keys=[("key", "ascending"), ("after", "ascending")]))


def as_texts(values: "Sequence[bytes | None] | AnyArray") -> AnyArray:
    """Bytes as text. In values that are not UTF-8, which Millrace never writes, invalid bytes are replaced."""
    raw = pa.array(values, pa.binary()) if isinstance(values, Sequence) else values.cast(pa.binary())
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if one is None else one.decode(errors="replace") for one in raw.to_pylist()]
        return pa.array(texts, pa.string())


def all_arranged(schema: TableSchema, images: AnyArray) -> AnyArray:
    """`sinks.rows.images.arranged` of many rows. A text that is no JSON object stays unchanged: it differs anyway."""
    right = _as_written(schema, images)
    if pc.all(right).as_py() or not len(images):
        return images
    others: AnyArray = pc.invert(right)
    return pc.replace_with_mask(images, others, _parsed(schema, images.filter(others)))


def _as_written(schema: TableSchema, images: AnyArray) -> AnyArray:
    """Which rows have exactly the schema's columns in their order and nothing between them."""
    pattern = _row_pattern(tuple(column.name for column in schema.columns))
    try:
        return pc.match_substring_regex(images.cast(pa.binary()), pattern)
    except pa.ArrowInvalid:  # with hundreds of columns the pattern is too large
        return pa.repeat(False, len(images))


@lru_cache(64)
def _row_pattern(names: tuple[str, ...]) -> str:
    row = ",".join(f"{re.escape(quote(name))}:{_VALUE}" for name in names)
    return rf"(?s)^\{{{row}\}}$"


def _parsed(schema: TableSchema, images: AnyArray) -> AnyArray:
    try:
        found = members(images)
    except Malformed:
        return pa.array([_one_arranged(schema, image) for image in images.to_pylist()], pa.string())
    raw = {name: column.json().cast(pa.string()).fill_null("null") for name, column in found.items()}
    return json_objects(len(images), {column.name: raw.get(column.name) for column in schema.columns})


def _one_arranged(schema: TableSchema, image: str) -> str:
    try:
        return arranged(schema, image)
    except ValueError:
        return image


def json_objects(count: int, columns: "dict[str, AnyArray | None]") -> AnyArray:
    """Columns of raw JSON values as objects; None is a column of nulls."""
    parts: list[AnyArray] = ["{"]
    for number, (name, values) in enumerate(columns.items()):
        parts += [f"{',' if number else ''}{quote(name)}:", "null" if values is None else values]
    joined: AnyArray = pc.binary_join_element_wise(*parts, pa.repeat("}", count), "")
    return joined

"""Compares the rows of a store with the expected rows. Pure.

The result has the keys that differ, never other values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.model import TableSchema

_IMAGES = ["key", "after"]
_BETWEEN = "\x1f"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The keys that differ, as texts: missing in the store, only in the store, or with other values."""

    missing: frozenset[str]
    extra: frozenset[str]
    different: frozenset[str]

    @property
    def keys(self) -> frozenset[str]:
        """Every key that differs."""
        return self.missing | self.extra | self.different

    def only(self, keys: frozenset[str]) -> "Comparison":
        """The comparison restricted to these keys."""
        return Comparison(self.missing & keys, self.extra & keys, self.different & keys)


NO_DIFFERENCE = Comparison(frozenset(), frozenset(), frozenset())


def key_columns(schema: TableSchema, rows: pa.Table) -> list[str]:
    """The columns that identify a row: `key` if the store returns images, else the table's key columns."""
    if rows.column_names == _IMAGES:
        return ["key"]
    return [column.name for column in schema.key] or list(rows.column_names)


def key_texts(rows: pa.Table, names: Sequence[str]) -> "pa.StringArray":
    """One text per row; equal keys have equal texts."""
    parts = [texts(rows[name].combine_chunks()) for name in names]
    if len(parts) == 1:
        return parts[0]
    joined: Any = pc.binary_join_element_wise(*parts, _BETWEEN)  # type: ignore[call-overload]
    return cast("pa.StringArray", joined)


def compare(schema: TableSchema, expected: pa.Table, stored: pa.Table) -> Comparison:
    """The keys that differ. If there are none, the usual case, it takes one pass over the bytes."""
    if expected.equals(stored):
        return NO_DIFFERENCE
    names = key_columns(schema, expected)
    expected_keys, stored_keys = key_texts(expected, names), key_texts(stored, names)
    index = pc.index_in(expected_keys, stored_keys)
    both = index.is_valid()
    unequal = pa.array(_unequal(expected.filter(both), stored.take(index.drop_null())))
    return Comparison(
        _set(expected_keys.filter(pc.invert(both))),
        _set(stored_keys.filter(pc.invert(pc.is_in(stored_keys, expected_keys)))) | _duplicates(stored_keys),
        _set(expected_keys.filter(both).filter(unequal)),
    )


def texts(values: "pa.Array[Any]") -> "pa.StringArray":
    """Values as texts; equal values have equal texts."""
    try:
        text = pc.cast(values, pa.string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        text = pa.array([None if value is None else repr(value) for value in values.to_pylist()], pa.string())
    return cast("pa.StringArray", pc.fill_null(text, pa.scalar("\x00")))


def _unequal(left: pa.Table, right: pa.Table) -> NDArray[np.bool_]:
    found = np.zeros(left.num_rows, np.bool_)
    for name in left.column_names:
        if name not in right.column_names:
            found[:] = True
        elif not left[name].equals(right[name]):
            found |= _unequal_column(left[name].combine_chunks(), right[name].combine_chunks())
    return found


def _unequal_column(left: "pa.Array[Any]", right: "pa.Array[Any]") -> NDArray[np.bool_]:
    """NULL equals NULL and NaN equals NaN: a store that has the value it was given is right."""
    try:
        same = np.asarray(pc.fill_null(pc.equal(left, right), pa.scalar(False)))
        nulls = np.asarray(left.is_null(nan_is_null=True)) & np.asarray(right.is_null(nan_is_null=True))
        unequal: NDArray[np.bool_] = ~(same | nulls)
        return unequal
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, TypeError):
        pairs = zip(left.to_pylist(), right.to_pylist(), strict=True)
        return np.fromiter((repr(one) != repr(other) for one, other in pairs), np.bool_, len(left))


def _duplicates(keys: "pa.StringArray") -> frozenset[str]:
    counts = pc.value_counts(keys)
    return _set(counts.field("values").filter(pc.greater(counts.field("counts"), pa.scalar(1))))


def _set(texts: "pa.Array[Any]") -> frozenset[str]:
    return frozenset(map(str, texts.to_pylist()))

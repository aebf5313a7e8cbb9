"""JSON objects to typed Arrow columns, exactly or not at all. Pure.

A value that does not fit its column's type is never clamped or rounded: its row is reported as a misfit. Other rows are
not affected.
"""

import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools
from cdc.json_text.columns import RawColumn, members, raw_column

NO_OBJECT = ""
"""In `Typed.misfits`, instead of a column's name: the text of the row is no JSON object."""


class ValueForm(StrEnum):
    """How a JSON value becomes a value of the column's type."""

    CAST = "cast"
    """The text of the value, cast by Arrow: exactly, or the row is a misfit."""
    JSON = "json"
    """The JSON text itself."""
    BASE64 = "base64"
    """The bytes that the base64 text encodes."""


@dataclass(frozen=True, slots=True)
class Typed:
    """The columns; `misfits` has the number of each row with a value that does not fit, and the name of its column;
    `absent` flags for each column the rows whose object lacks it.

    The trap: a misfit's value is null in its column, so check `misfits` before using a row.
    """

    columns: dict[str, AnyArray]
    misfits: dict[int, str]
    absent: dict[str, Bools]


def typed(columns: Mapping[str, tuple[pa.DataType, ValueForm]], images: AnyArray) -> Typed:
    """Read JSON objects as columns of these types. A missing member is null; so is every column of a null image."""
    raw, broken = objects(images)
    read = typed_members(columns, raw, len(images))
    return Typed(read.columns, {**read.misfits, **dict.fromkeys(broken, NO_OBJECT)}, read.absent)


def typed_members(
    columns: Mapping[str, tuple[pa.DataType, ValueForm]], raw: Mapping[str, RawColumn], count: int
) -> Typed:
    """The same for objects whose members are known already."""
    read: dict[str, AnyArray] = {}
    misfits: dict[int, str] = {}
    absent: dict[str, Bools] = {}
    for name, (type_, form) in columns.items():
        values = raw.get(name)
        if values is None:
            read[name], absent[name] = no_values(count, type_), np.ones(count, np.bool_)
            continue
        absent[name] = ~values.present
        read[name], unfit = _column(values, type_, form)
        for row in unfit:
            misfits.setdefault(row, name)
    return Typed(read, misfits, absent)


def typed_cells(cells: AnyArray, type_: pa.DataType, form: ValueForm) -> tuple[AnyArray, list[int]]:
    """JSON texts of values as a column of this type, and the numbers of the rows whose value does not fit."""
    return _column(raw_column(cells), type_, form)


def no_values(count: int, type_: pa.DataType) -> AnyArray:
    """`count` nulls of a type."""
    return pa.array([], type_).take(pa.array([None] * count, pa.int64()))


def objects(images: AnyArray) -> tuple[dict[str, RawColumn], list[int]]:
    """The members of JSON objects, and the numbers of the texts that are none: those have no members. Each is tested
    only if one of them is none."""
    try:
        return members(images), []
    except ValueError:
        broken = [row for row in range(len(images)) if not _is_object(images.slice(row, 1))]
    mask = np.zeros(len(images), np.bool_)
    mask[broken] = True
    whole = pc.if_else(pa.array(mask), pa.scalar(None, images.type), images)
    return members(whole), broken


def _is_object(image: AnyArray) -> bool:
    try:
        members(image)
    except ValueError:
        return False
    return True


def _column(values: RawColumn, type_: pa.DataType, form: ValueForm) -> tuple[AnyArray, list[int]]:
    if form is ValueForm.JSON:
        return values.json().cast(pa.string()), []
    texts = values.text()
    if form is ValueForm.BASE64:
        return _decoded(texts)
    if type_ == pa.string():
        return texts.cast(pa.string()), []
    return exact_cast(texts, type_)


def exact_cast(texts: AnyArray, type_: pa.DataType) -> tuple[AnyArray, list[int]]:
    """Cast texts; those that do not fit the type become null. Returns the numbers of their rows."""
    try:
        cast = texts.cast(type_)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _bisected(texts, type_)
    overflowed = _overflowed(texts, cast)
    if not overflowed:
        return cast, []
    mask = np.zeros(len(texts), np.bool_)
    mask[overflowed] = True
    return pc.if_else(pa.array(mask), pa.scalar(None, type_), cast), overflowed


def _bisected(texts: AnyArray, type_: pa.DataType) -> tuple[AnyArray, list[int]]:
    """Arrow does not say which row makes a cast fail: halve the rows until each misfit is found."""
    if len(texts) == 1:
        return no_values(1, type_), [0]
    half = len(texts) // 2
    left, unfit_left = exact_cast(texts.slice(0, half), type_)
    right, unfit_right = exact_cast(texts.slice(half), type_)
    return pa.concat_arrays([left, right]), unfit_left + [half + row for row in unfit_right]


def _overflowed(texts: AnyArray, cast: AnyArray) -> list[int]:
    """The rows whose finite number is too large for the float: Arrow silently makes it infinite."""
    if not pa.types.is_floating(cast.type):
        return []
    infinite = np.flatnonzero(_flags(pc.is_inf(cast)))
    return [row for row in infinite.tolist() if "inf" not in str(texts[row].as_py()).lower()]


def _flags(array: AnyArray) -> Bools:
    filled: AnyArray = array.fill_null(False)
    flags: Bools = filled.to_numpy(zero_copy_only=False)
    return flags


def _decoded(texts: AnyArray) -> tuple[AnyArray, list[int]]:
    decoded: list[bytes | None] = []
    unfit = []
    for row, text in enumerate(texts.to_pylist()):
        try:
            decoded.append(None if text is None else binascii.a2b_base64(text, strict_mode=True))
        except (binascii.Error, ValueError):
            decoded.append(None)
            unfit.append(row)
    return pa.array(decoded, pa.binary()), unfit

"""Row images of the source as those of a shaped table, all rows of a batch at once. Pure.

A column that a change lacks (`unchanged`: a large value that the server did not send) is not NULL. What is made of such
columns alone is unchanged too, and the store keeps it. The filter, and an expression that also reads other columns,
need the value: the row is refused with STORED_ROW_MISSING, and the applier reads it from the source again (ADR 30).
"""

import hmac
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools, Ints
from cdc.expressions.program import Evaluated
from cdc.expressions.values import typed_members
from cdc.json_text.columns import RawColumn
from cdc.json_text.quoted import all_quoted
from cdc.json_text.typed import objects
from sinks.rows.images import STORED_ROW_MISSING
from sinks.rows.stored_images import json_objects
from sinks.shape.columns import WHERE, ShapedColumn, ShapedColumns

_NAMES = pa.list_(pa.string())


@dataclass(frozen=True, slots=True)
class ShapedImages:
    """One row per given image. A row that is `gone` does not meet the filter; one that is `refused` has a reason.

    The trap: a refused row has nulls for what could not be computed.
    """

    after: AnyArray
    unchanged: AnyArray
    gone: Bools
    refused: dict[int, str]


def shaped_images(shaped: ShapedColumns, after: AnyArray, unchanged: AnyArray | None, secret: bytes) -> ShapedImages:
    """`unchanged` has the names of the columns that each image lacks; None: no image lacks any."""
    raw, broken = objects(after)
    lacks = _lacking(shaped, raw, unchanged, len(after))
    parts = [_Part(shaped, raw, rows, missing, secret).shaped() for rows, missing in _alike(lacks, len(after))]
    numbers = np.concatenate([part.rows for part in parts]) if parts else np.zeros(0, np.int64)
    order: AnyArray = pa.array(np.argsort(numbers, kind="stable"))
    refused = {int(part.rows[row]): reason for part in parts for row, reason in part.images.refused.items()}
    refused |= dict.fromkeys(broken, "the row image is not a JSON object")
    gone = np.zeros(len(after), np.bool_)
    for part in parts:
        gone[part.rows] = part.images.gone
    gone[list(refused)] = False
    images: AnyArray = pa.concat_arrays([pa.array([], pa.string()), *(part.images.after for part in parts)])
    names: AnyArray = pa.concat_arrays([pa.array([], _NAMES), *(part.images.unchanged for part in parts)])
    return ShapedImages(images.take(order), names.take(order), gone, refused)


def _lacking(
    shaped: ShapedColumns, raw: Mapping[str, RawColumn], unchanged: AnyArray | None, count: int
) -> dict[str, Bools]:
    """By column, the rows whose value is not known: it was not sent, or the source got the column later."""
    found: dict[str, Bools] = {}
    if unchanged is not None and count:
        owners: AnyArray = pc.list_parent_indices(unchanged)
        names: AnyArray = pc.list_flatten(unchanged)
        distinct: AnyArray = pc.unique(names)
        for name in distinct.to_pylist():
            lacks = np.zeros(count, np.bool_)
            same: AnyArray = pc.equal(names, pa.scalar(name))
            lacks[owners.filter(same).to_numpy()] = True
            found[name] = lacks
    for name in shaped.later:
        present = raw[name].present if name in raw else np.zeros(count, np.bool_)
        found[name] = ~present
    return {name: lacks for name, lacks in found.items() if lacks.any()}


def _alike(lacks: Mapping[str, Bools], count: int) -> Iterator[tuple[Ints, frozenset[str]]]:
    """Rows that lack the same columns; nearly always all rows, which lack none."""
    if not lacks:
        yield np.arange(count), frozenset()
        return
    names = list(lacks)
    patterns, which = np.unique(np.stack([lacks[name] for name in names], axis=1), axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        missing = frozenset(name for name, lacking in zip(names, pattern, strict=True) if lacking)
        yield np.flatnonzero(which.reshape(-1) == number), missing


@dataclass(frozen=True, slots=True)
class _ShapedPart:
    rows: Ints
    images: ShapedImages


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that lack the same columns."""

    shaped_columns: ShapedColumns
    raw: Mapping[str, RawColumn]
    rows: Ints
    missing: frozenset[str]
    secret: bytes

    def shaped(self) -> _ShapedPart:
        count = len(self.rows)
        raw = {name: self._of_rows(column) for name, column in self.raw.items()}
        evaluated, misfits = self._evaluated(raw)
        gone = self._gone(evaluated, misfits)
        refused = {row: reason for row, reason in evaluated.failed.items() if not gone[row]}
        cells: dict[str, AnyArray | None] = {}
        kept: list[str] = []
        reread = self.missing.intersection(self._filter_reads())
        for one in self.shaped_columns.columns:
            known = self._known(one)
            if known:
                cells[one.column.name] = self._cells(one, raw, evaluated)
            elif known is None:
                kept.append(one.column.name)
            else:
                reread |= self.missing
        if reread:
            refused = dict.fromkeys(np.flatnonzero(~gone).tolist(), STORED_ROW_MISSING)
        unchanged: AnyArray = pa.array([kept], _NAMES)
        unchanged = unchanged.take(pa.array(np.zeros(count, np.int64)))
        return _ShapedPart(self.rows, ShapedImages(json_objects(count, cells), unchanged, gone, refused))

    def _of_rows(self, column: RawColumn) -> RawColumn:
        return column if len(column.present) == len(self.rows) else column.take(self.rows)

    def _filter_reads(self) -> tuple[str, ...]:
        return self.shaped_columns.expressions[WHERE].columns if self.shaped_columns.filtered else ()

    def _evaluated(self, raw: Mapping[str, RawColumn]) -> tuple[Evaluated, Mapping[int, str]]:
        """The values of the expressions that read no missing column; and the rows with a column that does not fit its
        type, which have none."""
        program, expressions = self.shaped_columns.program, self.shaped_columns.expressions
        possible = [name for name in program.types if not self.missing.intersection(expressions[name].columns)]
        if not possible:
            return Evaluated(pa.table({}), {}), {}
        wanted = {name: self.shaped_columns.types[name] for name in program.columns}
        read = typed_members(raw, len(self.rows), wanted)
        rows = pa.table(read.columns) if wanted else pa.table({"none": pa.nulls(len(self.rows))})
        found = program.run_each(rows, possible, as_json=True)
        used = {name for place in possible for name in expressions[place].columns}
        misfits = {row: name for row, name in read.misfits.items() if name in used}
        reasons = {row: f"column {name} has a value that is no {wanted[name].lower()}" for row, name in misfits.items()}
        return Evaluated(found.rows, {**found.failed, **reasons}), misfits

    def _gone(self, evaluated: Evaluated, misfits: Mapping[int, str]) -> Bools:
        """Which rows do not meet the filter; false where that is not known. Such a row needs no values: a filter may
        exclude what an expression cannot compute."""
        gone = np.zeros(len(self.rows), np.bool_)
        reads = self._filter_reads()
        if WHERE not in evaluated.rows.column_names:
            return gone
        flags: AnyArray = pc.equal(evaluated.rows[WHERE].combine_chunks(), pa.scalar("true")).fill_null(False)
        gone = ~flags.to_numpy(zero_copy_only=False)
        place = self.shaped_columns.expressions[WHERE].place
        gone[[row for row, reason in evaluated.failed.items() if reason.startswith(f"{place}:")]] = False
        gone[[row for row, name in misfits.items() if name in reads]] = False
        found: Bools = gone
        return found

    def _known(self, one: ShapedColumn) -> bool | None:
        """Whether the column's value is known; None if it is unchanged; False if the row must be read again."""
        if one.expression:
            read = frozenset(self.shaped_columns.expressions[one.expression].columns)
        else:
            read = frozenset({one.source})
        missing = read & self.missing
        if not missing:
            return True
        return False if missing != read or missing & self.shaped_columns.later else None

    def _cells(self, one: ShapedColumn, raw: Mapping[str, RawColumn], evaluated: Evaluated) -> AnyArray | None:
        if one.expression:
            return evaluated.rows[one.expression].combine_chunks().fill_null("null")
        values = raw.get(one.source)
        if values is None:
            return None
        if one.mask is not None:
            return _masked(values, one.mask == "hash", self.secret).fill_null("null")
        return values.json().cast(pa.string()).fill_null("null")


def _masked(values: RawColumn, hashed: bool, secret: bytes) -> AnyArray:
    """Once per distinct value, as in `cdc.capture.rows.mask`."""
    texts: AnyArray = values.text().cast(pa.string()).dictionary_encode()
    if hashed:
        distinct = texts.dictionary.to_pylist()
        masked = [hmac.new(secret, text.encode(), sha256).hexdigest() for text in distinct]
    else:
        masked = ["***"] * len(texts.dictionary)
    return all_quoted(pa.array(masked, pa.string())).take(texts.indices)

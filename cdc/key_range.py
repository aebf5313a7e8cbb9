"""The rows of a partition, described by its bounds: a condition over columns of the key. Pure.

A removed partition removes its rows without sending deletes. Its bounds are known, and a row's partition columns are
part of its key, so one change in the log (`Op.REMOVE`) says which rows are gone: its `key` is the text of a `KeyRange`,
a JSON array, unlike the key of any row. Every sink tests its stored rows with `KeyRange.contains`, so all sinks agree.

The trap: only types that compare the same here and in Postgres can be bounds. See `KINDS`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import cache
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools

Kind = Literal["number", "time", "word"]
"""How values compare: by value, by time, or by their text."""

KINDS: Mapping[str, Kind] = {
    "int2": "number",
    "int4": "number",
    "int8": "number",
    "numeric": "number",
    "date": "time",
    "timestamp": "time",
    "timestamptz": "time",
    "uuid": "word",
}
"""Types allowed as bounds of a range. Not floats, which are rounded, and not texts, which a collation orders."""

LISTED: Mapping[str, Kind] = {**KINDS, "text": "word", "varchar": "word", "bool": "word"}
"""Types allowed as values of a list partition."""

MINVALUE, MAXVALUE = -1, 1
Bound = str | int
"""A value as in the log, without quotes and without a time zone; or MINVALUE or MAXVALUE."""

_REGULAR_TIME = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d{1,6})?)?")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Level:
    """The bounds at one level of a partitioned table: a range of several columns, lower inclusive and upper exclusive,
    or a list of values of one column, where None is NULL."""

    columns: tuple[str, ...]
    kinds: tuple[Kind, ...]
    lower: tuple[Bound, ...] = ()
    upper: tuple[Bound, ...] = ()
    listed: tuple[str | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.listed is None and not len(self.columns) == len(self.kinds) == len(self.lower) == len(self.upper):
            raise ValueError("a range needs one bound per column")
        for kind, bounds in zip(self.kinds, self._bounds(), strict=True):
            if not all(_understood(bound, kind) for bound in bounds if isinstance(bound, str)):
                raise ValueError(f"a bound is not a {kind} that can be compared")

    def _bounds(self) -> Sequence[Sequence[Bound | None]]:
        return [self.listed] if self.listed is not None else list(zip(self.lower, self.upper, strict=True))

    def facts(self) -> dict[str, object]:
        """As plain data for JSON; the inverse of `of_facts`."""
        data: dict[str, object] = {"columns": self.columns, "kinds": self.kinds}
        if self.listed is not None:
            return {**data, "in": self.listed}
        return {**data, "from": self.lower, "to": self.upper}

    @classmethod
    def of_facts(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `facts`. Raises ValueError, KeyError or TypeError on other data."""
        columns, kinds = tuple(data["columns"]), tuple(data["kinds"])
        if "in" in data:
            return cls(columns, kinds, listed=tuple(data["in"]))
        return cls(columns, kinds, tuple(data["from"]), tuple(data["to"]))

    def contains(self, columns: Mapping[str, AnyArray]) -> Bools:
        """For each row, whether its values are within the bounds."""
        if self.listed is not None:
            return self._lists(columns[self.columns[0]])
        within = self._beyond(columns, self.lower, below=False) & self._beyond(columns, self.upper, below=True)
        for name in self.columns:
            within &= _flags(columns[name].is_valid())
        return within

    def _lists(self, values: AnyArray) -> Bools:
        found = np.zeros(len(values), np.bool_)
        for one in self.listed or ():
            found |= _flags(values.is_null()) if one is None else _compared(values, self.kinds[0], one)[1]
        return found

    def _beyond(self, columns: Mapping[str, AnyArray], bounds: Sequence[Bound], *, below: bool) -> Bools:
        """For each row, whether it is below these bounds, or at or above them: the first column that differs
        decides."""
        count = len(columns[self.columns[0]])
        decided = np.full(count, not below)
        for name, kind, bound in reversed(list(zip(self.columns, self.kinds, bounds, strict=True))):
            if isinstance(bound, int):
                decided = np.full(count, (bound == MAXVALUE) == below)
                continue
            less, equal = _compared(columns[name], kind, bound)
            decided = (less if below else ~less & ~equal) | (equal & decided)
        return decided

    def condition(self) -> str:
        """The bounds as an SQL condition, for a session whose time zone is UTC. Rows with a NULL may match too.

        Without `is not null`: with it, in several ranges joined by OR, PostgreSQL 15 does not read the DEFAULT
        partition.
        """
        if self.listed is not None:
            return self._listed_condition(_identifier(self.columns[0]), self.listed)
        ends = [_row_condition(self.columns, self.lower, ">"), _row_condition(self.columns, self.upper, "<")]
        return " and ".join(end for end in ends if end) or "true"

    @staticmethod
    def _listed_condition(column: str, listed: Sequence[str | None]) -> str:
        values = [_literal(one) for one in listed if one is not None]
        parts = [f"{column} in ({', '.join(values)})"] if values else []
        parts += [f"{column} is null"] if None in listed else []
        return f"({' or '.join(parts)})"


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The rows of a partition: those within the bounds of every level above it."""

    levels: tuple[Level, ...]

    def text(self) -> str:
        """The key of the change in the log."""
        return json.dumps([level.facts() for level in self.levels], ensure_ascii=False, separators=(",", ":"))

    @classmethod
    @cache
    def parse(cls, text: str) -> Self:
        """The inverse of `text`. Raises ValueError."""
        try:
            return cls(tuple(Level.of_facts(level) for level in json.loads(text)))
        except (KeyError, TypeError) as error:
            raise ValueError("not a range of keys") from error

    @property
    def columns(self) -> list[str]:
        """The columns of all levels, each once."""
        return list(dict.fromkeys(name for level in self.levels for name in level.columns))

    def contains(self, columns: Mapping[str, AnyArray]) -> Bools:
        """For each row, whether it is in the range. Columns are texts as in the log, or typed."""
        flags: Bools = np.logical_and.reduce([level.contains(columns) for level in self.levels])
        return flags

    def contains_keys(self, keys: AnyArray) -> Bools:
        """For each of the log's keys, whether its row is in the range."""
        plain = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
        return self.contains({name: key_texts(plain, name) for name in self.columns})

    def condition(self) -> str:
        """The range as an SQL condition."""
        return " and ".join(level.condition() for level in self.levels)


@dataclass(frozen=True, slots=True)
class Removal:
    """The removal of all rows of a range that have a smaller version."""

    range: KeyRange
    version: int
    commit_lsn: int
    commit_ts: datetime

    def removes(self, keys: AnyArray, versions: AnyArray) -> Bools:
        """Which of these rows are removed."""
        older = _flags(pc.less(versions, pa.scalar(self.version, pa.int64())))
        if older.any():
            older[older] = self.range.contains_keys(keys.filter(pa.array(older)))
        return older


def key_texts(keys: AnyArray, name: str) -> AnyArray:
    """The values of one column of the log's keys, as texts without quotes; null for NULL.

    Not for keys with a JSON column: an object inside could have a member of this name. Such tables get no ranges.
    """
    found = pc.struct_field(pc.extract_regex(keys, _member(name)), "value")
    quoted = pc.starts_with(found, '"')
    inner = pc.if_else(quoted, pc.utf8_slice_codeunits(found, 1, -1), found)
    escaped = _flags(pc.and_(quoted, pc.match_substring(found, "\\")))
    if escaped.any():  # rare, and Arrow has no function for it
        texts = [json.loads(text) for text in found.filter(pa.array(escaped)).to_pylist()]
        inner = pc.replace_with_mask(inner, pa.array(escaped), pa.array(texts, pa.string()))
    return pc.if_else(pc.equal(found, pa.scalar("null")), pa.scalar(None, pa.string()), inner)


def _member(name: str) -> str:
    """A pattern for a member of a key. Quotes inside values are escaped, so it never matches inside a value."""
    quoted = re.escape(json.dumps(name, ensure_ascii=False))
    return rf'[{{,]{quoted}:(?P<value>"(?:[^"\\]|\\.)*"|[^",}}\]]+)'


def time_text(bound: str) -> str:
    """A time as a bound: `2026-01-31T10:00:00`, as in the log but without the zone, which is UTC."""
    return bound.removesuffix("+00").replace(" ", "T", 1)


def _understood(bound: str, kind: Kind) -> bool:
    return kind == "word" or bool((_REGULAR_TIME if kind == "time" else _NUMBER).fullmatch(bound))


def _compared(values: AnyArray, kind: Kind, bound: str) -> tuple[Bools, Bools]:
    """Which values are less than the bound, and which equal it. NULL is neither."""
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return _COMPARISONS[kind](values, bound)
    try:
        zoned = f"{bound}Z" if kind == "time" and getattr(values.type, "tz", None) else bound
        typed = pa.scalar(zoned).cast(values.type)
    except pa.ArrowInvalid:  # more digits than the column has
        return _COMPARISONS[kind](values.cast(pa.string()), bound)
    return _flags(pc.less(values, typed)), _flags(pc.equal(values, typed))


def _as_words(values: AnyArray, bound: str) -> tuple[Bools, Bools]:
    return _flags(pc.less(values, pa.scalar(bound))), _flags(pc.equal(values, pa.scalar(bound)))


def _as_times(values: AnyArray, bound: str) -> tuple[Bools, Bools]:
    """Compare ISO texts without their zone: they sort by time except for years before 1 or after 9999 and infinity."""
    texts = pc.utf8_rtrim(values, "Z")
    regular = _flags(pc.match_substring_regex(texts, r"^\d{4}-[^B]*$"))
    late = _flags(pc.match_substring_regex(texts, r"^(infinity|\d{5,}-[^B]*)$"))
    valid = _flags(values.is_valid())
    less = np.where(regular, _flags(pc.less(texts, pa.scalar(bound))), valid & ~late)
    return less, regular & _flags(pc.equal(texts, pa.scalar(bound)))


def _as_numbers(values: AnyArray, bound: str) -> tuple[Bools, Bools]:
    try:
        numbers, limit = pc.cast(values, pa.int64()), pa.scalar(int(bound), pa.int64())
    except (pa.ArrowInvalid, ValueError, OverflowError):
        return _as_decimals(values, bound)
    return _flags(pc.less(numbers, limit)), _flags(pc.equal(numbers, limit))


def _as_decimals(values: AnyArray, bound: str) -> tuple[Bools, Bools]:
    """Compare numbers of any length, each distinct one in Python: numeric keys are rare. NaN is above all others."""
    coded = values.dictionary_encode()
    limit = Decimal(bound)
    numbers = [Decimal("Infinity" if text == "NaN" else text) for text in coded.dictionary.to_pylist()]
    indices: AnyArray = coded.indices
    found = [pa.array([test(number) for number in numbers], pa.bool_()) for test in (limit.__gt__, limit.__eq__)]
    less, equal = (_flags(flags.take(indices)) for flags in found)
    return less, equal


_COMPARISONS: Mapping[Kind, Callable[[AnyArray, str], tuple[Bools, Bools]]] = {
    "word": _as_words,
    "time": _as_times,
    "number": _as_numbers,
}


def _flags(found: AnyArray) -> Bools:
    plain = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    flags: Bools = plain.fill_null(False).to_numpy(zero_copy_only=False).copy()
    return flags


def _row_condition(columns: Sequence[str], bounds: Sequence[Bound], sign: str) -> str:
    """`(a, b) >= (1, 2)` for a lower bound, `<` for an upper one; empty if MINVALUE or MAXVALUE sets no bound."""
    finite = [bound for bound in bounds if isinstance(bound, str)]
    finite = finite[: next((at for at, bound in enumerate(bounds) if isinstance(bound, int)), len(bounds))]
    edge = next((bound for bound in bounds if isinstance(bound, int)), MINVALUE)
    if not finite:
        return "" if (edge == MAXVALUE) == (sign == "<") else "false"
    inclusive = (edge == MINVALUE) == (sign == ">")
    left = ", ".join(_identifier(name) for name in columns[: len(finite)])
    return f"({left}) {sign}{'=' if inclusive else ''} ({', '.join(map(_literal, finite))})"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str) -> str:
    quoted = value.replace("'", "''")
    return " E'" + quoted.replace("\\", "\\\\") + "'" if "\\" in value else f"'{quoted}'"

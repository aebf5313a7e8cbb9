"""Which rows a partition can hold, said by its bounds: a condition over columns of the key. Pure.

A partition that goes takes its rows with it and sends no delete. Its bounds are known, and a row's partition columns
are part of its key, so one change in the log (`Op.REMOVE`) can say which rows went: its `key` is the text of a
`KeyRange`, a JSON array, which no row's key is. Every store tests the rows that it holds by `KeyRange.holds`, so all
of them agree.

The trap: only what orders and compares alike here and in Postgres may become a bound. See `KINDS`.
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
"""Types of which a range can be a bound. Floats are rounded and texts ordered by a collation: neither is here."""

LISTED: Mapping[str, Kind] = {**KINDS, "text": "word", "varchar": "word", "bool": "word"}
"""Types of which single values can be a bound."""

MINVALUE, MAXVALUE = -1, 1
Bound = str | int
"""A value as the log writes it, without quotes and without a time zone; or one of MINVALUE and MAXVALUE."""

_REGULAR_TIME = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d{1,6})?)?")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Level:
    """The bounds at one level of a partitioned table: from (inclusive) to (exclusive) of several columns compared one
    after the other, or the values of one column, where None is NULL."""

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
                raise ValueError(f"a bound is no {kind} that can be compared")

    def _bounds(self) -> Sequence[Sequence[Bound | None]]:
        return [self.listed] if self.listed is not None else list(zip(self.lower, self.upper, strict=True))

    def facts(self) -> dict[str, object]:
        """For JSON; the opposite of `of_facts`."""
        said: dict[str, object] = {"columns": self.columns, "kinds": self.kinds}
        if self.listed is not None:
            return {**said, "in": self.listed}
        return {**said, "from": self.lower, "to": self.upper}

    @classmethod
    def of_facts(cls, said: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError or TypeError on anything that `facts` does not give."""
        columns, kinds = tuple(said["columns"]), tuple(said["kinds"])
        if "in" in said:
            return cls(columns, kinds, listed=tuple(said["in"]))
        return cls(columns, kinds, tuple(said["from"]), tuple(said["to"]))

    def holds(self, columns: Mapping[str, AnyArray]) -> Bools:
        """For each row, whether its values lie within."""
        if self.listed is not None:
            return self._lists(columns[self.columns[0]])
        held = self._beyond(columns, self.lower, below=False) & self._beyond(columns, self.upper, below=True)
        for name in self.columns:
            held &= _flags(columns[name].is_valid())
        return held

    def _lists(self, values: AnyArray) -> Bools:
        found = np.zeros(len(values), np.bool_)
        for one in self.listed or ():
            found |= _flags(values.is_null()) if one is None else _compared(values, self.kinds[0], one)[1]
        return found

    def _beyond(self, columns: Mapping[str, AnyArray], bounds: Sequence[Bound], *, below: bool) -> Bools:
        """Rows below these bounds, or at and above them: the first column that differs decides."""
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
        """The same in Postgres's SQL, for a session whose time zone is UTC; a row with a NULL may meet it too.

        Without `is not null`: in one of several ranges joined by OR, PostgreSQL 15 then leaves the DEFAULT partition
        unread, whatever it holds.
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
        """As a change in the log names it."""
        return json.dumps([level.facts() for level in self.levels], ensure_ascii=False, separators=(",", ":"))

    @classmethod
    @cache
    def parse(cls, text: str) -> Self:
        """Read it back. Raises ValueError."""
        try:
            return cls(tuple(Level.of_facts(said) for said in json.loads(text)))
        except (KeyError, TypeError) as error:
            raise ValueError("not a range of keys") from error

    @property
    def columns(self) -> list[str]:
        """The columns that decide, each once."""
        return list(dict.fromkeys(name for level in self.levels for name in level.columns))

    def holds(self, columns: Mapping[str, AnyArray]) -> Bools:
        """For each row, whether it is in the range. Columns are texts as the log writes them, or typed ones."""
        flags: Bools = np.logical_and.reduce([level.holds(columns) for level in self.levels])
        return flags

    def holds_keys(self, keys: AnyArray) -> Bools:
        """For each of the log's keys, whether its row is in the range."""
        plain = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
        return self.holds({name: key_texts(plain, name) for name in self.columns})

    def condition(self) -> str:
        """The range in Postgres's SQL."""
        return " and ".join(level.condition() for level in self.levels)


@dataclass(frozen=True, slots=True)
class Removal:
    """Rows of a range are gone: every one with a smaller version than this."""

    range: KeyRange
    version: int
    commit_lsn: int
    commit_ts: datetime

    def takes(self, keys: AnyArray, versions: AnyArray) -> Bools:
        """Which of these rows go."""
        older = _flags(pc.less(versions, pa.scalar(self.version, pa.int64())))
        if older.any():
            older[older] = self.range.holds_keys(keys.filter(pa.array(older)))
        return older


def key_texts(keys: AnyArray, name: str) -> AnyArray:
    """The values of one column of the log's keys, as texts without quotes; null for NULL.

    Keys with a column of JSON are never given a range: an object inside could have a member of this name.
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
    """Finds a member of a key. A quote inside a value is escaped, so this never begins within one."""
    quoted = re.escape(json.dumps(name, ensure_ascii=False))
    return rf'[{{,]{quoted}:(?P<value>"(?:[^"\\]|\\.)*"|[^",}}\]]+)'


def time_text(bound: str) -> str:
    """A time as a bound: `2026-01-31T10:00:00`, as the log writes it but without its zone, which is UTC."""
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
    """ISO texts without their zone are in the order of time, but for years before 1 and after 9999, and infinity."""
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
    """Numbers of any length, each distinct one by Python: keys by numeric are rare. NaN is above all of them."""
    coded = values.dictionary_encode()
    limit = Decimal(bound)
    numbers = [Decimal("Infinity" if text == "NaN" else text) for text in coded.dictionary.to_pylist()]
    places: AnyArray = coded.indices
    found = [pa.array([test(number) for number in numbers], pa.bool_()) for test in (limit.__gt__, limit.__eq__)]
    less, equal = (_flags(flags.take(places)) for flags in found)
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
    """`(a, b) >= (1, 2)` for a lower bound, `<` for an upper one; what MINVALUE and MAXVALUE leave open is left out."""
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

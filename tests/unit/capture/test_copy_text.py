"""COPY's text format, as Postgres writes it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.capture.rows import copy_text
from cdc.capture.rows.byte_spans import Spans
from cdc.errors import DecodeError

_ESCAPES = {"\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}


def written(rows: list[list[str | None]]) -> bytes:
    """The rows as COPY TO writes them."""
    lines = ["\t".join("\\N" if v is None else "".join(_ESCAPES.get(c, c) for c in v) for v in row) for row in rows]
    return "".join(line + "\n" for line in lines).encode()


def _nulls(spans: Spans) -> list[bool]:
    return [False] * len(spans) if spans.valid is None else [not valid for valid in spans.valid]


def read(chunk: bytes, width: int) -> list[list[str | None]]:
    block = copy_text.parse(chunk, width)
    columns = [
        [None if null else spans.value(row).decode() for row, null in enumerate(_nulls(spans))]
        for spans in block.columns
    ]
    assert block.count == len(columns[0])
    return [list(row) for row in zip(*columns, strict=True)]


VALUES = st.none() | st.text(st.sampled_from('ab\\N\t\n\r\b\f\vü"{}'), max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(VALUES, min_size=width, max_size=width), min_size=1)))
def test_what_copy_writes_is_read_back(rows: list[list[str | None]]) -> None:
    assert read(written(rows), len(rows[0])) == rows


def test_null_is_told_from_its_own_text() -> None:
    assert read(b"\\N\t\\\\N\tN\n", 3) == [[None, "\\N", "N"]]


def test_nothing_is_no_rows() -> None:
    assert copy_text.parse(b"", 3).count == 0
    assert copy_text.parse(b"\n\n", 0).count == 2


@pytest.mark.parametrize(
    ("chunk", "width"), [(b"a\tb", 2), (b"a\tb\n", 3), (b"a\n", 2), (b"a\tb\nc\n", 2), (b"a\nb\tc\td\n", 2)]
)
def test_lines_that_do_not_fit_are_refused(chunk: bytes, width: int) -> None:
    with pytest.raises(DecodeError):
        copy_text.parse(chunk, width)

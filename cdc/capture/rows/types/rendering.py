"""How a type becomes JSON: the one form that every type family fills, and the registry that finds it.

A family is one file of this package. It registers its renderers by `pg_type.typname` when it is imported, and
`cdc.capture.rows.types` imports every file, so adding a type touches one file only. Types that nobody registered are
their Postgres text as a JSON string.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cdc.capture.rows.byte_spans import Flags, Places, Spans
from cdc.model import PgType, TypeKind


@dataclass(frozen=True, slots=True)
class Rendered:
    """A column ready for the image: row i is entry i of `spans`, or entry `codes[i]` where there are codes.

    `valid` tells NULLs by row (None: there are none). Entries must ascend in their buffer, so converted values that
    repeat are given once and pointed to by `codes`; then the buffer must not be the one the column came in.
    """

    spans: Spans
    valid: Flags | None = None
    codes: Places | None = None

    def value(self, row: int) -> bytes:
        """One row's text."""
        return self.spans.value(row if self.codes is None else int(self.codes[row]))


@dataclass(frozen=True, slots=True)
class Renderer:
    """A type's way into JSON. `quoted`: the image puts quotation marks around every value of the column."""

    render: Callable[[Spans], Rendered]
    quoted: bool


_FAMILIES: dict[str, Renderer] = {}
_ARRAYS: list[Callable[[PgType, Renderer], Renderer]] = []
_FALLBACK: list[Renderer] = []


def register(*names: str, renderer: Renderer) -> None:
    """Let these types (by `pg_type.typname`) be rendered so."""
    for name in names:
        _FAMILIES[name] = renderer


def register_arrays(make: Callable[[PgType, Renderer], Renderer]) -> None:
    """Let arrays be rendered by what `make` builds from the element type and its renderer."""
    _ARRAYS[:] = [make]


def register_fallback(renderer: Renderer) -> None:
    """Let every other type be rendered so."""
    _FALLBACK[:] = [renderer]


def renderer_of(kind: PgType) -> Renderer:
    """The renderer of a type: a domain's is that of its base, an array's is built from its element's."""
    if kind.kind is TypeKind.DOMAIN and kind.element is not None:
        return renderer_of(kind.element)
    if kind.kind is TypeKind.ARRAY and kind.element is not None:
        return _ARRAYS[0](kind.element, renderer_of(kind.element))
    if kind.kind is TypeKind.BASE:
        return _FAMILIES.get(kind.name, _FALLBACK[0])
    return _FALLBACK[0]


def unchanged(spans: Spans) -> Rendered:
    """The Postgres text is the JSON text."""
    return Rendered(spans, spans.valid)


def overlaid(column: Spans, odd: Flags, texts: Spans, codes: Places, valid: Flags | None) -> Rendered:
    """A converted column whose `odd` rows are `texts[codes]` instead: for the few values that do not bear treatment as
    a whole."""
    base, count = len(column.data), len(column)
    entries = Spans(
        np.concatenate((column.data, texts.data)),
        np.concatenate((column.start, texts.start + base)),
        np.concatenate((column.stop, texts.stop + base)),
    )
    row = np.arange(count)
    row[odd] = count + codes
    return Rendered(entries, valid, row)

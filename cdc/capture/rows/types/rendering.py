"""How a type becomes JSON: the interface of every type family, and the registry of renderers.

A family is one file of this package. It registers its renderers by `pg_type.typname` when it is imported, and
`cdc.capture.rows.types` imports every file, so adding a type changes one file only. A type without a renderer becomes
its Postgres text as a JSON string.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cdc.arrays import Bools, Ints
from cdc.capture.rows.byte_spans import Spans
from cdc.model import PgType, TypeKind


@dataclass(frozen=True, slots=True)
class Rendered:
    """A column ready for the image: row i is entry i of `spans`, or entry `codes[i]` if there are codes.

    `valid` is false for NULLs (None: there are none). Entries must ascend in their buffer, so a repeated converted
    value is stored once and referred to by `codes`; then the buffer must not be the input buffer.
    """

    spans: Spans
    valid: Bools | None = None
    codes: Ints | None = None

    def value(self, row: int) -> bytes:
        """One row's text."""
        return self.spans.value(row if self.codes is None else int(self.codes[row]))


@dataclass(frozen=True, slots=True)
class Renderer:
    """Converts a type to JSON. `quoted`: the image puts quotation marks around every value of the column."""

    render: Callable[[Spans], Rendered]
    quoted: bool


_FAMILIES: dict[str, Renderer] = {}
_ARRAYS: list[Callable[[PgType, Renderer], Renderer]] = []
_FALLBACK: list[Renderer] = []


def register(*names: str, renderer: Renderer) -> None:
    """Render these types (by `pg_type.typname`) with this renderer."""
    for name in names:
        _FAMILIES[name] = renderer


def register_arrays(make: Callable[[PgType, Renderer], Renderer]) -> None:
    """Render arrays with the renderer that `make` builds from the element type and its renderer."""
    _ARRAYS[:] = [make]


def register_fallback(renderer: Renderer) -> None:
    """Render every other type with this renderer."""
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


def overlaid(column: Spans, odd: Bools, texts: Spans, codes: Ints, valid: Bools | None) -> Rendered:
    """A converted column whose `odd` rows are `texts[codes]` instead: for the few values that need conversion value by
    value."""
    base, count = len(column.data), len(column)
    entries = Spans(
        np.concatenate((column.data, texts.data)),
        np.concatenate((column.start, texts.start + base)),
        np.concatenate((column.stop, texts.stop + base)),
    )
    row = np.arange(count)
    row[odd] = count + codes
    return Rendered(entries, valid, row)

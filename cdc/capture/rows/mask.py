"""Masking: columns are dropped, hashed or masked before an image is built.

A rule replaces the column's renderer, so it applies to rows, old rows, keys and snapshots alike, and no image ever
contains the value. A hash is keyed (HMAC-SHA256, hex, of the value's Postgres text) and computed once per distinct
value of a batch; equal values stay equal, so joins and keys still work. NULL stays NULL.
"""

import hmac
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256

import numpy as np

from cdc.capture.rows.byte_spans import Spans, distinct
from cdc.capture.rows.types import BUILT_IN, Rendered, Renderer, renderer_of
from cdc.errors import ConfigError
from cdc.model import Column, TableId, TableSchema

_TEXT = BUILT_IN[25]
_STARS = Spans.pack([b"***"])


class Rule(StrEnum):
    """What happens to a column's values."""

    DROP = "drop"
    HASH = "hash"
    MASK = "mask"


@dataclass(frozen=True, slots=True)
class Masking:
    """The rules of a pipeline, by table and column. `only` lists the columns to keep; key columns are always kept.

    `secret` is the key of the hash and is never shown.
    """

    rules: Mapping[TableId, Mapping[str, Rule]] = field(default_factory=dict)
    only: Mapping[TableId, frozenset[str]] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        hashed = [str(table) for table, rules in self.rules.items() if Rule.HASH in rules.values()]
        if hashed and not self.secret:
            raise ConfigError(f"Columns of {', '.join(hashed)} are to be hashed without a key", "Set source.mask_key.")

    def columns(self, schema: TableSchema) -> Iterator[tuple[int, Column, Renderer]]:
        """The columns that stay, as recorded, each with its index at the source and its renderer."""
        rules = self.rules.get(schema.table, {})
        only = self.only.get(schema.table)
        for index, column in enumerate(schema.columns):
            rule = rules.get(column.name)
            if column.key and rule in (Rule.DROP, Rule.MASK):
                raise ConfigError(
                    f"Column {column.name} of {schema.table} is part of its key: the rule `{rule}` would remove it",
                    "Use `hash`: equal keys stay equal.",
                )
            if rule is Rule.DROP or (only is not None and column.name not in only and not column.key):
                continue
            yield index, *self._masked(column, rule)

    def _masked(self, column: Column, rule: Rule | None) -> tuple[Column, Renderer]:
        if rule is None:
            return column, renderer_of(column.type)
        text = replace(column, type=_TEXT, modifier=-1)
        return text, Renderer(self._hash if rule is Rule.HASH else _star, quoted=True)

    def _hash(self, spans: Spans) -> Rendered:
        values, codes = distinct(spans)
        digests = [hmac.new(self.secret, value, sha256).hexdigest().encode() for value in values]
        return Rendered(Spans.pack(digests or [b""]), spans.valid, codes)


def _star(spans: Spans) -> Rendered:
    return Rendered(_STARS, spans.valid, np.zeros(len(spans), np.int64))


NO_MASK = Masking()

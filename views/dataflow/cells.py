"""Steps on rows of cells: columns whose values are JSON texts as they were captured. They keep no state."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.json_text.members import quote
from views.dataflow.delta import ID, SIGN


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a JSON object: its name, the column of its value, and what stands for null."""

    name: str
    column: str
    missing: str = "null"


@dataclass(frozen=True, slots=True)
class Selected:
    """Adds computed columns and keeps only some.

    `keys`: columns joined to one key text; null if any of them is null, because null matches nothing.
    `objects`: JSON objects. `orders`: a column as a number and a text to sort by.
    """

    keep: tuple[str, ...] = ()
    keys: tuple[tuple[str, tuple[str, ...]], ...] = ()
    objects: tuple[tuple[str, tuple[Member, ...]], ...] = ()
    orders: tuple[tuple[str, str, str], ...] = ()

    def step(self, delta: pa.Table) -> pa.Table:
        """The same rows with other columns."""
        columns: dict[str, AnyArray] = {name: delta.column(name) for name in (ID, SIGN, *self.keep)}
        for name, parts in self.keys:
            columns[name] = joined([delta.column(part) for part in parts])
        for name, members in self.objects:
            columns[name] = rendered(delta, members)
        for number, text, source in self.orders:
            columns[number], columns[text] = _number(delta.column(source)), _text(delta.column(source))
        return pa.table(columns)


def joined(columns: Sequence[AnyArray]) -> AnyArray:
    """Cells as one text; null if any is null. JSON texts joined by commas are unambiguous."""
    if len(columns) == 1:
        return columns[0]
    return pc.binary_join_element_wise(*columns, ",", null_handling="emit_null")


def rendered(rows: pa.Table, members: Sequence[Member]) -> AnyArray:
    """A JSON object per row."""
    parts: list[AnyArray] = []
    opening = "{"
    for member in members:
        parts.append(pa.scalar(f"{opening}{quote(member.name)}:"))
        parts.append(pc.fill_null(rows.column(member.column), pa.scalar(member.missing)))
        opening = ","
    return pc.binary_join_element_wise(*parts, pa.scalar("}" if members else "{}"), "")


def _number(cells: AnyArray) -> AnyArray:
    """Numbers sort as numbers, and before null; texts, and numbers of more than 300 digits, by `_text` alone."""
    numeric = pc.match_substring_regex(cells, r"^-?\d{1,300}(\.\d+)?([eE][-+]?\d{1,2})?$")
    return pc.if_else(numeric, cells, "0").cast(pa.float64()).fill_null(np.inf)


def _text(cells: AnyArray) -> AnyArray:
    """Without the quote at the end, which would come between `a` and `a b`."""
    return pc.fill_null(pc.replace_substring_regex(cells, '"$', ""), "")


@dataclass(frozen=True, slots=True)
class Renamed:
    """Keeps some columns under other names; `id` names the column whose text identifies the row from here on."""

    names: tuple[tuple[str, str], ...]
    """Pairs of former and new name."""
    id: str = ""

    def step(self, delta: pa.Table) -> pa.Table:
        """The same rows."""
        columns: dict[str, AnyArray] = {ID: delta.column(self.id or ID), SIGN: delta.column(SIGN)}
        columns |= {new: delta.column(old) for old, new in self.names}
        return pa.table(columns)

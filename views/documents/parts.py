"""The parts of a document, checked against the captured tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from cdc.errors import ConfigError
from cdc.expressions.column_types import postgres_name, type_of
from cdc.model import ForeignKey, TableId
from views.catalog import Catalog
from views.comparable import have_equal_texts
from views.documents.settings import IncludeSettings

_REMEDY = "match: {column of the included table: column of the outer table}"


@dataclass(frozen=True, slots=True)
class Match:
    """How the rows of a part find the row that they belong to: pairs of own column and outer column."""

    own: tuple[str, ...]
    outer: tuple[str, ...]
    many: bool
    link: TableId | None = None
    """The table between the two; `own` are then its columns, and `link_columns` and `far` join it with the part."""
    link_columns: tuple[str, ...] = ()
    far: tuple[str, ...] = ()

    @property
    def of_part(self) -> tuple[str, ...]:
        """The columns of the part itself that are needed."""
        return self.far if self.link else self.own


@dataclass(frozen=True, slots=True)
class Part:
    """A table in the document, with what belongs to its rows."""

    table: TableId
    columns: tuple[str, ...]
    key: tuple[str, ...]
    children: tuple[tuple[str, Match, Part], ...] = ()
    order_by: str = ""

    @property
    def order(self) -> str:
        """The column that orders the rows of this part in an array."""
        return self.order_by or self.key[0]


def read_part(
    table: TableId, columns: tuple[str, ...], include: Sequence[IncludeSettings], catalog: Catalog, place: str
) -> Part:
    """A table and what it includes. Raises ConfigError, which names the place."""
    for name in columns:
        catalog.column(table, name, place)
    names = tuple(column.name for column in catalog.schema(table, place).columns)
    shown = tuple(name for name in names if not columns or name in columns)
    children: list[tuple[str, Match, Part]] = []
    for item in include:
        name = item.name or item.table.name
        inner = f"{place}, include {name}"
        if name in shown or name in [known for known, _, _ in children]:
            raise ConfigError(f"{inner}: {table} has another member {name}.", "Give it another `name`.")
        child = read_part(item.table, item.columns, item.include, catalog, inner)
        match = _match(table, item, catalog, inner)
        _require_comparable(table, item.table, match, catalog, inner)
        children.append((name, match, replace(child, order_by=_order(item, match, child, catalog, inner))))
    return Part(table, shown, catalog.key(table, place), tuple(children))


def _order(item: IncludeSettings, match: Match, child: Part, catalog: Catalog, place: str) -> str:
    """The column that orders the array: of the key, the first one that differs within an array."""
    if item.order_by:
        catalog.column(item.table, item.order_by, place)
        return item.order_by
    own = () if match.link else match.own
    return next((name for name in child.key if name not in own), child.key[0])


def _match(outer: TableId, item: IncludeSettings, catalog: Catalog, place: str) -> Match:
    if item.through is not None:
        return _linked(outer, item, item.through, catalog, place)
    if item.match:
        return _declared(outer, item, catalog, place)
    down = _foreign_keys(item.table, outer, catalog)
    up = _foreign_keys(outer, item.table, catalog)
    _require_one([*down, *up], item.table, outer, place)
    if down:
        many = set(catalog.key(item.table, place)) != set(down[0].columns)
        return Match(down[0].columns, down[0].parent_columns, many=many)
    return Match(up[0].parent_columns, up[0].columns, many=False)


def _declared(outer: TableId, item: IncludeSettings, catalog: Catalog, place: str) -> Match:
    for own, other in item.match.items():
        catalog.column(item.table, own, place)
        catalog.column(outer, other, place)
    many = set(catalog.key(item.table, place)) != set(item.match)
    return Match(tuple(item.match), tuple(item.match.values()), many=many)


def _linked(outer: TableId, item: IncludeSettings, link: TableId, catalog: Catalog, place: str) -> Match:
    catalog.schema(link, place)
    near, far = _foreign_keys(link, outer, catalog), _foreign_keys(link, item.table, catalog)
    _require_one(near, link, outer, place)
    _require_one(far, link, item.table, place)
    return Match(near[0].columns, near[0].parent_columns, True, link, far[0].columns, far[0].parent_columns)


def _foreign_keys(table: TableId, parent: TableId, catalog: Catalog) -> list[ForeignKey]:
    return [key for key in catalog.foreign_keys if (key.table, key.parent) == (table, parent)]


def _require_one(found: Sequence[ForeignKey], left: TableId, right: TableId, place: str) -> None:
    if not found:
        raise ConfigError(
            f"{place}: there is no foreign key between {left} and {right}.",
            f"Name the columns that are equal: {_REMEDY}",
        )
    if len(found) > 1:
        listed = "; ".join(f"{key.table} ({', '.join(key.columns)})" for key in found)
        raise ConfigError(
            f"{place}: there are several foreign keys between {left} and {right}: {listed}.", f"Choose one: {_REMEDY}"
        )


def _require_comparable(outer: TableId, table: TableId, match: Match, catalog: Catalog, place: str) -> None:
    """Rows are found by the texts of their keys, which must be the same for equal values."""
    pairs = [(match.link or table, own, outer, other) for own, other in zip(match.own, match.outer, strict=True)]
    if match.link is not None:
        pairs += [(match.link, one, table, two) for one, two in zip(match.link_columns, match.far, strict=True)]
    for left, own, right, other in pairs:
        one, two = catalog.column(left, own, place), catalog.column(right, other, place)
        types = type_of(one.type, one.modifier), type_of(two.type, two.modifier)
        same_blanks = types == ("BPCHAR", "BPCHAR") and one.modifier == two.modifier
        if not have_equal_texts(*types) and not same_blanks:
            names = f"{left}.{own} is {postgres_name(types[0])}, {right}.{other} is {postgres_name(types[1])}"
            raise ConfigError(
                f"{place}: {names}: equal values may have different texts.",
                "Give both columns one type: a whole number, numeric(p,s), text, uuid, a date or a time.",
            )


def needed_columns(part: Part, more: Iterable[str] = ()) -> dict[TableId, set[str]]:
    """The columns that are needed of each table."""
    found = {part.table: {*part.columns, *part.key, *more, *filter(None, [part.order_by])}}
    for _, match, child in part.children:
        found[part.table] |= set(match.outer)
        needed = [needed_columns(child, match.of_part)]
        if match.link:
            needed.append({match.link: {*match.own, *match.link_columns}})
        for table, columns in chain.from_iterable(each.items() for each in needed):
            found[table] = found.get(table, set()) | columns
    return found

"""The columns of a shaped table: what each is made of, checked against the schema of the source. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

from cdc.config.settings import TableShape
from cdc.errors import ConfigError
from cdc.expressions.column_types import column_of, columns_of
from cdc.expressions.expression import Expression, parse
from cdc.expressions.program import Program, compile_program
from cdc.model import Column, PgType, TableSchema

Mask = Literal["hash", "mask"]
_TEXT = PgType(25, "text")
WHERE = "where"


@dataclass(frozen=True, slots=True)
class ShapedColumn:
    """A column of the store. Its values are those of `source`, perhaps masked, or those of the program's expression
    `expression`."""

    column: Column
    source: str = ""
    mask: Mask | None = None
    expression: str = ""


@dataclass(frozen=True, slots=True)
class ShapedColumns:
    """The columns of one table in one sink, and the program of its expressions and its filter."""

    schema: TableSchema
    """The store's: what the sink is told."""
    columns: tuple[ShapedColumn, ...]
    program: Program
    expressions: Mapping[str, Expression]
    """Those of the program, by their place; the filter is WHERE."""
    types: Mapping[str, str]
    """The types of the source's columns in expressions."""
    later: frozenset[str]
    """Columns that the shape names and that the source got after this schema: images with it lack them."""

    @property
    def renamed_key(self) -> dict[str, str]:
        """New names of key columns, by their old ones."""
        key = [one for one in self.columns if one.column.key]
        return {one.source: one.column.name for one in key if one.source != one.column.name}

    @property
    def filtered(self) -> bool:
        """Whether some rows may not be stored."""
        return WHERE in self.expressions


def shaped_columns(
    shape: TableShape, schema: TableSchema, sink: str, newest: TableSchema | None = None
) -> ShapedColumns:
    """Raises ConfigError, which names the place in the shape, for what does not fit the schema.

    `newest` is a later schema of the table: a column that only it has may be named too.
    """
    place = f"sink {sink!r}, shape of {schema.table}"
    newer = {column.name: column for column in newest.columns} if newest is not None else {}
    known = {column.name for column in schema.columns}
    later = frozenset(newer.keys() - known)
    types = {**columns_of(schema), **(columns_of(newest) if newest is not None and later else {}), **columns_of(schema)}
    _check_names(shape, schema, place, [*known, *later])
    expressions = {where: parse(text, f"{place}, {where}") for where, text in shape.expressions()}
    select = {where: expression for where, expression in expressions.items() if expression.column is None}
    if WHERE in expressions:
        compile_program({}, expressions[WHERE], types)  # must be boolean
        select[WHERE] = expressions[WHERE]
    program = compile_program(select, None, types)
    columns = (*_of_source(shape, schema, program), *_computed(shape, schema, expressions, program, types))
    _check_unique(columns, place)
    stored = replace(schema, columns=tuple(one.column for one in columns))
    return ShapedColumns(stored, columns, program, select, types, later & _named(shape, expressions))


def _of_source(shape: TableShape, schema: TableSchema, program: Program) -> Iterator[ShapedColumn]:
    for column in schema.columns:
        rule = shape.mask.get(column.name)
        if column.name in shape.drop or rule == "drop":
            continue
        name = shape.rename.get(column.name, column.name)
        cast = f"cast.{column.name}"
        if cast in program.types:
            yield ShapedColumn(column_of(name, program.types[cast]), expression=cast)
        elif rule is not None:
            yield ShapedColumn(Column(name, _TEXT), column.name, "hash" if rule == "hash" else "mask")
        else:
            yield ShapedColumn(replace(column, name=name), column.name)


def _computed(
    shape: TableShape,
    schema: TableSchema,
    expressions: Mapping[str, Expression],
    program: Program,
    types: Mapping[str, str],
) -> Iterator[ShapedColumn]:
    source = {column.name: column for column in schema.columns}
    for name in shape.compute:
        place = f"compute.{name}"
        copied = expressions[place].column
        if copied is None:
            yield ShapedColumn(column_of(name, program.types[place]), expression=place)
        elif copied in source:
            yield ShapedColumn(replace(source[copied], name=name, key=False), copied)
        else:
            if copied not in types:
                compile_program({place: expressions[place]}, None, types)  # says which columns there are
            yield ShapedColumn(column_of(name, types[copied]), copied)


def _check_names(shape: TableShape, schema: TableSchema, place: str, known: list[str]) -> None:
    """Every column that the shape names exists: the mask of a column that the source has renamed would hide nothing."""
    for part in ("rename", "drop", "cast", "mask"):
        for name in getattr(shape, part):
            if name not in known:
                near = get_close_matches(name, known, 2)
                remedy = f"Did you mean {' or '.join(near)}? " if near else ""
                remedy += "If it was renamed or dropped in the source, change the shape. "
                message = f"{place}, {part}: unknown column {name!r}."
                raise ConfigError(message, f"{remedy}Columns: {', '.join(known)}.")
    for column in schema.key:
        for part in ("drop", "cast", "mask"):
            if column.name in getattr(shape, part):
                raise ConfigError(
                    f"{place}, {part}: column {column.name} is part of the key, which identifies the row in the store.",
                    "A key column can only be renamed.",
                )
    foreign = not (schema.oid or schema.identity != "d")  # a log of another program does not say what the key is
    if schema.keyed_by_row and not foreign and (shape.compute or shape.drop or shape.cast or shape.mask):
        raise ConfigError(
            f"{place}: the whole row is the key of {schema.table}, so its columns can only be renamed.",
            "Give the table a primary key.",
        )


def _check_unique(columns: tuple[ShapedColumn, ...], place: str) -> None:
    names = [one.column.name for one in columns]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{place}: two columns have the name {name!r}.",
                "Choose another name, or drop the column of the source.",
            )


def _named(shape: TableShape, expressions: Mapping[str, Expression]) -> set[str]:
    read = {name for expression in expressions.values() for name in expression.columns}
    return read | set(shape.rename) | set(shape.drop) | set(shape.cast) | set(shape.mask)

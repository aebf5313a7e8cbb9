"""The bounds of a leaf partition as a range of keys, or why they are none.

For RANGE and LIST partitions, the bounds of all levels above a leaf determine its rows. For a HASH partition a function
of the server does, and a DEFAULT partition has the rows that no sibling takes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cdc.capture.source.connect import Connection, explained
from cdc.key_range import KINDS, LISTED, MAXVALUE, MINVALUE, Bound, KeyRange, Kind, Level, time_text
from cdc.model import TableSchema, TypeKind

_BOUNDS = """
select l.oid::bigint, (
  select json_agg(json_build_array(pt.partstrat::text, pg_get_expr(c.relpartbound, c.oid), (
      select json_agg(json_build_array(a.attname, t.typname, t.typtype::text,
               o.opcdefault and coalesce(co.collisdeterministic, true)) order by k.at)
        from unnest(pt.partattrs::int2[], pt.partclass::oid[], pt.partcollation::oid[])
               with ordinality as k(attnum, class, coll, at)
        join pg_catalog.pg_opclass o on o.oid = k.class
        left join pg_catalog.pg_collation co on co.oid = k.coll
        left join pg_catalog.pg_attribute a on a.attrelid = pt.partrelid and a.attnum = k.attnum and a.attnum > 0
        left join pg_catalog.pg_type t on t.oid = a.atttypid)) order by p.at desc)
    from pg_catalog.pg_partition_ancestors(l.oid) with ordinality as p(relid, at)
    join pg_catalog.pg_class c on c.oid = p.relid
    join pg_catalog.pg_inherits i on i.inhrelid = c.oid
    join pg_catalog.pg_partitioned_table pt on pt.partrelid = i.inhparent)
  from unnest(%s::oid[]) as l(oid)
"""
_IN_RANGE = re.compile(r"FOR VALUES FROM \((.*)\) TO \((.*)\)", re.DOTALL)
_IN_LIST = re.compile(r"FOR VALUES IN \((.*)\)", re.DOTALL)
_VALUE = re.compile(r"\s*(?:(E?)'((?:[^']|'')*)'|([^,'\s]+))\s*(?:,|$)", re.DOTALL)
_SEPARATED = re.compile(r"\) TO \(")


def read(connection: Connection, leaves: Sequence[int]) -> Mapping[int, str]:
    """By oid: the text of the leaf's range, or the reason why it has none. Levels start at the root."""
    with explained("Reading the partitions' bounds"):
        rows = connection.execute(_BOUNDS, [list(leaves)]).fetchall()
    return {oid: bounds_of(levels or ()) for oid, levels in rows}


def bounds_of(levels: Sequence[Sequence[Any]]) -> str:
    """From the catalog's description of each level (strategy, bound, columns with their types). Pure."""
    try:
        return KeyRange(tuple(_level(*level) for level in levels)).text()
    except ValueError as error:
        return str(error)


def unfit(bounds: str, schema: TableSchema) -> str:
    """Why these bounds do not determine which rows of the log they contain; empty: they do."""
    if not bounds.startswith("["):
        return bounds or "its bounds were not known before it was removed"
    key = {column.name: column.type for column in schema.key or schema.columns}
    for level in KeyRange.parse(bounds).levels:
        for name, kind in zip(level.columns, level.kinds, strict=True):
            if name not in key:
                return f"column {name} is not part of the key"
            if LISTED.get(key[name].name, "word" if key[name].kind is TypeKind.ENUM else "") != kind:
                return f"column {name} is masked, or its type differs from that of its partitions"
    if any(type_.name in ("json", "jsonb", "_json", "_jsonb") for type_ in key.values()):
        return "the key has a column of JSON"
    return ""


def _level(strategy: str, bound: str, columns: Sequence[Sequence[Any]]) -> Level:
    if bound == "DEFAULT":
        raise ValueError("it is a DEFAULT partition, which has no bounds")
    if strategy == "h":
        raise ValueError("it is a HASH partition, which has no bounds")
    names = tuple(str(name) for name, *_ in columns)
    kinds = tuple(_kind(strategy, *column) for column in columns)
    types = [str(column[1]) for column in columns]
    if strategy == "l" and (found := _IN_LIST.fullmatch(bound)):
        listed = tuple(None if raw is None else _text(raw, types[0]) for raw in values(found[1]))
        return Level(names, kinds, listed=listed)
    if strategy == "r" and (found := _IN_RANGE.fullmatch(bound)) and len(_SEPARATED.findall(bound)) == 1:
        return Level(names, kinds, _ends(found[1], types), _ends(found[2], types))
    raise ValueError("its bounds could not be parsed")


def _kind(strategy: str, name: str | None, type_: str | None, made: str | None, plain: bool) -> Kind:
    if name is None or type_ is None:
        raise ValueError("its table is partitioned by an expression")
    kind = (LISTED if strategy == "l" else KINDS).get(type_, "word" if made == "e" and strategy == "l" else None)
    if kind is None or not plain:
        raise ValueError(f"the stores cannot compare values of column {name} ({type_}) as the server does")
    return kind


def _ends(listed: str, types: Sequence[str]) -> tuple[Bound, ...]:
    edges = {"MINVALUE": MINVALUE, "MAXVALUE": MAXVALUE}
    raw = list(values(listed))
    if len(raw) != len(types) or None in raw:
        raise ValueError("its bounds could not be parsed")
    return tuple(edges.get(one or "") or _text(one or "", type_) for one, type_ in zip(raw, types, strict=True))


def _text(raw: str, type_: str) -> str:
    """A bound in the format of the log. It was read with the session settings that the stream uses too."""
    if type_ == "timestamptz" and not raw.endswith("+00"):
        raise ValueError("its bounds are not in UTC")
    return time_text(raw) if KINDS.get(type_) == "time" else raw


def values(listed: str) -> Iterator[str | None]:
    """The values of a list in Postgres's notation, without quotes; None for NULL. Raises ValueError."""
    at = 0
    while at < len(listed):
        found = _VALUE.match(listed, at)
        if found is None:
            raise ValueError("its bounds could not be parsed")
        escaped, quoted, bare = found.groups()
        if quoted is not None:
            text = quoted.replace("''", "'")
            yield text.replace("\\\\", "\\") if escaped else text
        else:
            yield None if bare == "NULL" else bare
        at = found.end()

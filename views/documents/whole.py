"""The documents by one query over the captured tables: what the steps must agree with.

DuckDB joins and collects; only the text of a member is made in the same way as in the steps.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from cdc.expressions import engine
from cdc.expressions.engine import quoted
from cdc.json_text.members import quote
from cdc.model import TableId
from views.dataflow.delta import ID
from views.dataflow.output import ROW
from views.documents.parts import Match, Part


def whole_documents(query: str, tables: Mapping[TableId, pa.Table]) -> pa.Table:
    """The rows of `documents_query`; `tables` have cells."""
    connection = engine.cursor()
    for table, cells in tables.items():
        connection.register(str(table), cells)
    found: pa.Table = connection.sql(query).to_arrow_table()
    return found


def documents_query(root: Part) -> str:
    """SQL that gives ID and ROW of every document."""
    return f'select {quoted(ID)}, "_doc" as {quoted(ROW)} from ({_rows_sql(root, ())})'  # noqa: S608  SQL of this module


def _rows_sql(part: Part, need: Sequence[str]) -> str:
    """The rows of a part, with the columns `need`."""
    members = [f"{_literal(quote(name) + ':')} || coalesce(t.{quoted(name)}, 'null')" for name in part.columns]
    for name, match, child in part.children:
        members.append(f"{_literal(quote(name) + ':')} || {_member_sql(match, child)}")
    cell = f"t.{quoted(part.order)}"
    numeric = f"regexp_full_match({cell}, '-?\\d{{1,300}}(\\.\\d+)?([eE][-+]?\\d{{1,2}})?')"
    number = f"case when {cell} is null then 'inf' when {numeric} then {cell} else '0' end::double"
    text = f"coalesce(regexp_replace({cell}, '\"$', ''), '')"
    columns = "".join(f", t.{quoted(name)}" for name in dict.fromkeys(need))
    body = " || ',' || ".join(members)
    document = f"'{{' || {body} || '}}'"
    shown = f't."_id", {document} as "_doc", {number} as "_order", {text} as "_text"{columns}'
    return f"select {shown} from {quoted(str(part.table))} t"  # noqa: S608  SQL of this module


def _member_sql(match: Match, child: Part) -> str:
    rows = f"({_rows_sql(child, match.of_part)}) c"
    if match.link is not None:
        link = f"{quoted(str(match.link))} l on {_equal('l', 'c', match.link_columns, match.far)}"
        source = f"{rows} join {link} where {_equal('l', 't', match.own, match.outer)}"
        return _list_sql(source, 'l."_id" || chr(31) || c."_id"')
    source = f"{rows} where {_equal('c', 't', match.own, match.outer)}"
    if match.many:
        return _list_sql(source, 'c."_id"')
    return f"""coalesce((select c."_doc" from {source}), 'null')"""  # noqa: S608  SQL of this module


def _list_sql(source: str, order: str) -> str:
    listed = f"""'[' || string_agg(c."_doc", ',' order by c."_order", c."_text", {order}) || ']'"""
    return f"coalesce((select {listed} from {source}), '[]')"  # noqa: S608  SQL of this module


def _equal(left: str, right: str, names: tuple[str, ...], others: tuple[str, ...]) -> str:
    pairs = zip(names, others, strict=True)
    return " and ".join(f"{left}.{quoted(own)} = {right}.{quoted(other)}" for own, other in pairs)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

"""The whole result of a statement, computed at once by DuckDB from the tables: what the steps must agree with.

Only the expressions are shared with the steps. Joins, conditions and groups are DuckDB's own.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from cdc.arrays import AnyArray
from cdc.expressions import engine
from cdc.expressions.expression import Expression
from cdc.expressions.program import output_sql
from cdc.expressions.translation import Inputs, translate
from cdc.expressions.values import typed_cells
from cdc.model import TableId
from views.dataflow.delta import ID, SIGN
from views.dataflow.output import ROW
from views.dataflow.typed import KEY, Shown
from views.query.aggregates import reduced
from views.query.compiled import conjunction, needed_columns
from views.query.grouping import grouping_of, part_of
from views.query.statement import Input, Statement


def whole_result(statement: Statement, show: Shown, tables: Mapping[TableId, pa.Table]) -> pa.Table:
    """ID and ROW of every row of the result. `tables` have cells."""
    needed = needed_columns(statement)
    types = {name: type_ for name, type_ in statement.types.items() if name in needed}
    connection = engine.cursor()
    for number, each in enumerate(statement.inputs):
        connection.register(f"t{number}", _values(each, types, tables[each.table]))
    query, names = _query(statement, types)
    found = connection.sql(query).to_arrow_table().rename_columns(names)
    nothing: AnyArray = pa.repeat("", found.num_rows)
    columns: dict[str, AnyArray] = {ID: nothing, SIGN: pa.array(np.ones(found.num_rows, np.int8))}
    columns |= {name: found.column(name) for name in names}
    rows = show.step(pa.table(columns))
    return rows.select([KEY, ROW]).rename_columns([ID, ROW])


def _values(each: Input, types: Mapping[str, str], cells: pa.Table) -> pa.Table:
    """The values of one table, in columns named as `Inputs` names them."""
    place = Inputs(types).place
    found: dict[str, AnyArray] = {
        place(name): typed_cells(cells.column(name.partition(".")[2]), type_)
        for name, type_ in types.items()
        if name in each.types
    }
    return pa.table(found)


def _query(statement: Statement, types: Mapping[str, str]) -> tuple[str, list[str]]:
    """SQL that gives the result, and the names of its columns."""
    inputs = Inputs(types)
    source = f"{_joins(statement, inputs)}{_where(conjunction(statement.where, statement), inputs)}"
    if statement.grouped:
        return _grouped(statement, inputs, source)
    items = {item.name: item.expression for item in statement.items}
    return f"select {_columns(items, inputs)} from {source}", list(items)  # noqa: S608  SQL of this module


def _joins(statement: Statement, inputs: Inputs) -> str:
    source = "t0"
    for number, clause in enumerate(statement.joins, 1):
        pairs = [f"{translate(one, inputs).sql} = {translate(two, inputs).sql}" for one, two in clause.equal]
        pairs += [translate(each, inputs).sql for each in (*clause.own, *clause.rest)]
        source += f" {clause.kind} join t{number} on {' and '.join(pairs)}"
    return source


def _where(condition: Expression | None, inputs: Inputs) -> str:
    return f" where {translate(condition, inputs).sql}" if condition is not None else ""


def _columns(items: Mapping[str, Expression], inputs: Inputs) -> str:
    found = [output_sql(translate(each, inputs)) for each in items.values()]
    return ", ".join(f"{value} as o{number}" for number, value in enumerate(found))


def _grouped(statement: Statement, inputs: Inputs, source: str) -> tuple[str, list[str]]:
    """Three selects, one in the other: the arguments, the aggregates, the columns of the result."""
    found = grouping_of(statement)
    before = {name: translate(each, inputs) for name, each in found.arguments.items()}
    sent = [f'{output_sql(one)} as "{name}"' for name, one in before.items()]
    arguments = ", ".join(sent) or "1 as one"
    types, values = {name: before[name].type for name in found.key}, [f'"{name}"' for name in found.key]
    for name, call, columns in found.calls:
        how = reduced(call, columns, [before[each].type for each in columns], part_of(statement, call.node))
        types[name] = how.type
        values.append(f'{how.rows_sql} as "{name}"')
    by = ", ".join(f'"{name}"' for name in found.key)
    groups = f" group by {by}" if by else " having count(*) > 0"
    inner = f"select {', '.join(values)} from (select {arguments} from {source}){groups}"  # noqa: S608  SQL of this module
    outer = Inputs(types)
    named = ", ".join(f'"{name}" as {outer.place(name)}' for name in types)
    condition = _where(found.having, outer)
    return f"select {_columns(found.items, outer)} from (select {named} from ({inner})){condition}", list(found.items)  # noqa: S608  SQL of this module

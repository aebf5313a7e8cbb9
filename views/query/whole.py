"""The whole result of a statement, computed at once by DuckDB from the tables: what the steps must agree with.

Only the expressions are shared with the steps. Joins, conditions and groups are DuckDB's own.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from cdc.expressions import engine
from cdc.expressions.translation import Inputs, translate
from cdc.expressions.values import arrow_type, typed_cells
from cdc.model import TableId
from views.dataflow.delta import ID, SIGN
from views.dataflow.output import ROW
from views.dataflow.typed import KEY, Shown
from views.query.aggregates import reduced
from views.query.compiled import conjunction, grouping_of, needed_columns
from views.query.statement import Input, Statement


def whole_result(statement: Statement, show: Shown, tables: Mapping[TableId, pa.Table]) -> pa.Table:
    """ID and ROW of every row of the result. `tables` have cells."""
    needed = needed_columns(statement)
    types = {name: type_ for name, type_ in statement.types.items() if name in needed}
    connection = engine.cursor()
    for number, each in enumerate(statement.inputs):
        connection.register(f"t{number}", _values(each, types, tables[each.table], list(types)))
    query, names = _query(statement, types)
    found = connection.sql(query).to_arrow_table().rename_columns(names)
    count = found.num_rows
    own = {ID: pa.array([""] * count, pa.string()), SIGN: pa.array(np.ones(count, np.int8))}
    rows = show.step(pa.table({**own, **{name: found.column(name) for name in names}}))
    return pa.table({ID: rows.column(KEY), ROW: rows.column(ROW)})


def _values(each: Input, types: Mapping[str, str], cells: pa.Table, order: list[str]) -> pa.Table:
    """The values of one table, in columns named as `Inputs` names them."""
    mine = [name for name in order if name in each.types]
    return pa.table(
        {f"c{order.index(name)}": typed_cells(cells.column(name.partition(".")[2]), types[name]) for name in mine}
    )


def _query(statement: Statement, types: Mapping[str, str]) -> tuple[str, list[str]]:
    inputs = Inputs(types)
    source = "t0"
    for number, clause in enumerate(statement.joins, 1):
        pairs = [f"{translate(a, inputs).sql} = {translate(b, inputs).sql}" for a, b in clause.equal]
        pairs += [translate(each, inputs).sql for each in (*clause.own, *clause.rest)]
        source += f" {clause.kind} join t{number} on {' and '.join(pairs)}"
    condition = conjunction(statement.where, statement)
    where = f" where {translate(condition, inputs).sql}" if condition is not None else ""
    if not statement.grouped:
        items = {item.name: translate(item.expression, inputs) for item in statement.items}
        columns = ", ".join(f"{_sent(one.sql, one.type)} as o{at}" for at, one in enumerate(items.values()))
        return f"select {columns} from {source}{where}", list(items)
    return _grouped(statement, inputs, f"{source}{where}")


def _grouped(statement: Statement, inputs: Inputs, source: str) -> tuple[str, list[str]]:
    found = grouping_of(statement)
    before = {name: translate(each, inputs) for name, each in found.arguments.items()}
    inner = ", ".join(f'{_sent(one.sql, one.type)} as "{name}"' for name, one in before.items()) or "1 as one"
    types = {name: before[name].type for name in found.key}
    calls = []
    for name, call, columns in found.calls:
        how = reduced(call, columns, [before[column].type for column in columns], lambda a, b: ValueError(a))
        calls.append((name, how))
        types[name] = how.type
    middle = ", ".join([*(f'"{name}"' for name in found.key), *(f'{how.rows_sql} as "{name}"' for name, how in calls)])
    by = (
        f" group by {', '.join(chr(34) + name + chr(34) for name in found.key)}"
        if found.key
        else " having count(*) > 0"
    )
    outer = Inputs(types)
    named = ", ".join(f'"{name}" as {outer.place(name)}' for name in types)
    items = {name: translate(each, outer) for name, each in found.items.items()}
    having = f" where {translate(found.having, outer).sql}" if found.having is not None else ""
    columns = ", ".join(f"{_sent(one.sql, one.type)} as o{at}" for at, one in enumerate(items.values()))
    return (
        f"select {columns} from (select {named} from (select {middle} from (select {inner} from {source}){by})){having}",
        list(items),
    )


def _sent(sql: str, type_: str) -> str:
    return f"cast({sql} as varchar)" if pa.types.is_string(arrow_type(type_)) else f"cast({sql} as {type_})"

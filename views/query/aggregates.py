"""The aggregates that a statement may contain: their types, and how they are computed. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp

from cdc.expressions.column_types import postgres_name
from cdc.expressions.expression import Expression
from cdc.expressions.values import cell_sql
from views.comparable import is_ordered

_WHOLE = ("SMALLINT", "INTEGER", "BIGINT")
_FLOATS = ("REAL", "DOUBLE")


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A call of an aggregate. `arguments` are parts of the statement; their columns are given as names."""

    node: exp.Expr
    function: str
    arguments: tuple[exp.Expr, ...]
    condition: exp.Expr | None = None
    """FILTER (WHERE …)."""
    distinct: bool = False
    descending: bool = False
    constant: str = ""
    """A literal argument: a fraction, a separator, a number of values."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """How it is computed: its type, from the rows, and from the totals of its first argument if that is possible."""

    type: str
    rows_sql: str
    totals_sql: str = ""


def is_aggregate(node: exp.Expr) -> bool:
    """Whether a node computes one value of several rows."""
    if isinstance(node, exp.Anonymous):
        return node.name.lower() in _BY
    return isinstance(node, (exp.AggFunc, exp.WithinGroup, exp.Filter))


def aggregate_of(node: exp.Expr, whole: Expression) -> Aggregate | None:
    """The aggregate that a node is; None if it is none. Raises ConfigError for one that is not available."""
    if isinstance(node, exp.Filter):
        inner = aggregate_of(node.this, whole)
        return None if inner is None else _replaced(inner, node, node.expression.this)
    if isinstance(node, exp.WithinGroup):
        return _percentile(node, whole)
    if isinstance(node, exp.Anonymous) and node.name.lower() in _BY:
        return _by(node, whole)
    if not isinstance(node, exp.AggFunc):
        return None
    reader = _READERS.get(type(node))
    if reader is None:
        raise whole.error(
            f"the aggregate {node.sql('postgres')[:40]} is not available.", f"Available: {', '.join(NAMES)}.", node
        )
    return reader(node, whole)


def _replaced(inner: Aggregate, node: exp.Expr, condition: exp.Expr) -> Aggregate:
    return Aggregate(node, inner.function, inner.arguments, condition, inner.distinct, inner.descending, inner.constant)


def _count(node: exp.Expr, whole: Expression) -> Aggregate:
    inner = node.this
    if isinstance(inner, exp.Star):
        return Aggregate(node, "count", ())
    if isinstance(inner, exp.Distinct):
        if len(inner.expressions) != 1:
            raise whole.error("count(distinct …) of several values.", "Count one value.", node)
        return Aggregate(node, "count", (inner.expressions[0],), distinct=True)
    return Aggregate(node, "count", (inner,))


def _plain(function: str) -> Callable[[exp.Expr, Expression], Aggregate]:
    def read(node: exp.Expr, whole: Expression) -> Aggregate:
        _require_plain(function, node.this, node, whole)
        return Aggregate(node, function, (node.this,))

    return read


def _require_plain(function: str, argument: exp.Expr, node: exp.Expr, whole: Expression) -> None:
    if isinstance(argument, exp.Distinct):
        raise whole.error(f"{function}(distinct …) is not available.", "Write it without distinct.", node)
    if isinstance(argument, exp.Order):
        raise whole.error(f"{function}(… order by …) is not available.", "Write it without ORDER BY.", node)


def _listed(node: exp.Expr, whole: Expression) -> Aggregate:
    inner, order, descending = node.this, None, False
    if isinstance(inner, exp.Order):
        first = inner.expressions[0]
        if len(inner.expressions) > 1:
            raise whole.error("an array is ordered by one value.", "Leave the others out.", node)
        inner, order, descending = inner.this, first.this, bool(first.args.get("desc"))
    _require_plain("array_agg", inner, node, whole)
    return Aggregate(node, "array_agg", (inner, order if order is not None else inner), descending=descending)


def _percentile(node: exp.Expr, whole: Expression) -> Aggregate:
    function = {exp.PercentileCont: "percentile_cont", exp.PercentileDisc: "percentile_disc"}.get(type(node.this))
    order = node.expression.expressions if isinstance(node.expression, exp.Order) else []
    if function is None or len(order) != 1 or not isinstance(node.this.this, exp.Literal):
        raise whole.error(
            "this is no percentile.", "Write: percentile_cont(0.95) within group (order by latency)", node
        )
    first = order[0]
    fraction = float(node.this.this.name)
    if not 0 <= fraction <= 1:
        raise whole.error("the fraction of a percentile is between 0 and 1.", "For instance 0.95.", node)
    fraction = 1 - fraction if first.args.get("desc") else fraction
    return Aggregate(node, function, (first.this,), constant=repr(fraction))


def _by(node: exp.Expr, whole: Expression) -> Aggregate:
    name = node.name.lower()
    if len(node.expressions) != 2:
        raise whole.error(f"{name} has two arguments.", f"Write: {_BY[name]}", node)
    one, other = node.expressions
    if name == "top_k":
        if not isinstance(other, exp.Literal) or other.is_string or int(other.name) < 1:
            raise whole.error("top_k needs a number of values.", f"Write: {_BY[name]}", node)
        return Aggregate(node, name, (one,), constant=other.name)
    return Aggregate(node, name, (one, other))


_BY = {"first_by": "first_by(status, at)", "last_by": "last_by(status, at)", "top_k": "top_k(amount, 3)"}
_READERS: Mapping[type[exp.Expr], Callable[[exp.Expr, Expression], Aggregate]] = {
    exp.Count: _count,
    exp.Sum: _plain("sum"),
    exp.Avg: _plain("avg"),
    exp.Min: _plain("min"),
    exp.Max: _plain("max"),
    exp.ArrayAgg: _listed,
    exp.ApproxDistinct: _plain("approx_count_distinct"),
    exp.LogicalAnd: _plain("bool_and"),
    exp.LogicalOr: _plain("bool_or"),
}
NAMES = (
    *("count", "sum", "avg", "min", "max", "bool_and", "bool_or", "array_agg", "percentile_cont", "percentile_disc"),
    *("approx_count_distinct", *_BY),
)


def reduced(call: Aggregate, columns: Sequence[str], types: Sequence[str], whole: Expression) -> Reduced:
    """How a call is computed, with its arguments in these columns of these types. `whole` is the call, for errors."""
    quoted = [f'"{column}"' for column in columns]
    rule = _RULES[call.function]
    return rule(call, quoted, list(types), whole)


def sum_digits(type_: str) -> int | None:
    """The decimals of a sum of values of this type; None if they are not summed."""
    if type_ in _WHOLE:
        return 0
    return int(type_.rstrip(")").partition(",")[2]) if type_.startswith("DECIMAL(") else None


def _require_ordered(whole: Expression, call: Aggregate, type_: str) -> None:
    if not is_ordered(type_):
        message = f"{call.function} of {postgres_name(type_)}, whose values are known as texts only."
        raise whole.error(message, "Cast it, for instance to numeric(p,s) or text.", whole.tree)


def _order(column: str, type_: str, way: str = "asc") -> str:
    """What to sort by: 0 and -0 are equal and have different texts."""
    return f"{column} {way} nulls last" + (f", not signbit({column}) {way}" if type_ in _FLOATS else "")


def _reduced_count(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    if call.distinct:
        _require_ordered(whole, call, types[0])
        return Reduced("BIGINT", f"count(distinct {columns[0]})")
    if not columns:
        return Reduced("BIGINT", "count(*)", "_count")
    return Reduced("BIGINT", f"count({columns[0]})", _total("n", columns))


def _total(kind: str, columns: list[str]) -> str:
    return f'"{kind}_{columns[0].strip(chr(34))}"'


def _digits(call: Aggregate, types: list[str], whole: Expression) -> int:
    digits = sum_digits(types[0])
    if digits is None:
        float_ = types[0] in _FLOATS
        message = f"{call.function} of {types[0].lower()}"
        raise whole.error(
            f"{message}: the sum of floats depends on the order of the rows." if float_ else f"{message}.",
            "Cast it to numeric(p,s), for instance: sum(amount::numeric(18,4))",
            whole.tree,
        )
    return digits


def _reduced_sum(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    digits = _digits(call, types, whole)
    type_ = "BIGINT" if types[0] in ("SMALLINT", "INTEGER") else f"DECIMAL(38,{digits})"
    summed = f"cast(sum(cast({columns[0]} as decimal(38,{digits}))) as {type_})"
    total = f"case when {_total('n', columns)} > 0 then cast({_total('s', columns)} as {type_}) end"
    return Reduced(type_, summed, total)


def _reduced_avg(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    """As a double: an exact sum divided by the count."""
    digits = _digits(call, types, whole)
    summed = f"cast(sum(cast({columns[0]} as decimal(38,{digits}))) as double) / count({columns[0]})"
    count, total = _total("n", columns), _total("s", columns)
    return Reduced("DOUBLE", summed, f"case when {count} > 0 then cast({total} as double) / {count} end")


def _reduced_extreme(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    _require_ordered(whole, call, types[0])
    if types[0] not in _FLOATS:
        return Reduced(types[0], f"{call.function}({columns[0]})")
    way = "asc" if call.function == "min" else "desc"
    return Reduced(types[0], f"first({columns[0]} order by {_order(columns[0], types[0], way)})")


def _reduced_bool(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    if types[0] != "BOOLEAN":
        raise whole.error(f"{call.function} of {types[0].lower()}.", "Compare it first.", whole.tree)
    return Reduced("BOOLEAN", f"{call.function}({columns[0]})")


def _reduced_percentile(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    if call.function == "percentile_disc":
        _require_ordered(whole, call, types[0])
        value = f"({columns[0]} + 0)" if types[0] in _FLOATS else columns[0]  # -0 becomes 0: they are equal
        return Reduced(types[0], f"quantile_disc({value}, {call.constant})")
    if types[0] not in _FLOATS and sum_digits(types[0]) is None:
        raise whole.error(
            f"percentile_cont of {types[0].lower()}.", "Use percentile_disc, or cast to a number.", whole.tree
        )
    return Reduced("DOUBLE", f"quantile_cont(cast({columns[0]} as double), {call.constant})")


def _reduced_first(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    _require_ordered(whole, call, types[1])
    if types[0] == "INTERVAL":
        raise whole.error(f"{call.function} of interval.", "Extract its seconds: extract(epoch from …)", whole.tree)
    way = "desc" if call.function == "last_by" else "asc"
    order = f"{_order(columns[1], types[1], way)}, {_order(columns[0], types[0], way)}"
    return Reduced(types[0], f"first({columns[0]} order by {order})")


def _reduced_list(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    for type_ in types:
        _require_ordered(whole, call, type_)
    way = "desc" if call.descending else "asc"
    order = f"{_order(columns[1], types[1], way)}, {_order(columns[0], types[0], way)}"
    return Reduced(f"{types[0]}[]", cell_sql(f"list({columns[0]} order by {order})", f"{types[0]}[]"))


def _reduced_top(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    _require_ordered(whole, call, types[0])
    one = columns[0]
    listed = f"list({one} order by {_order(one, types[0], 'desc')}) filter (where {one} is not null)"
    return Reduced(f"{types[0]}[]", cell_sql(f"coalesce({listed}, [])[:{call.constant}]", f"{types[0]}[]"))


def _reduced_distinct(call: Aggregate, columns: list[str], types: list[str], whole: Expression) -> Reduced:
    _require_ordered(whole, call, types[0])
    return Reduced("BIGINT", f"approx_count_distinct({columns[0]})")


_RULES: Mapping[str, Callable[[Aggregate, list[str], list[str], Expression], Reduced]] = {
    "count": _reduced_count,
    "sum": _reduced_sum,
    "avg": _reduced_avg,
    "min": _reduced_extreme,
    "max": _reduced_extreme,
    "bool_and": _reduced_bool,
    "bool_or": _reduced_bool,
    "array_agg": _reduced_list,
    "percentile_cont": _reduced_percentile,
    "percentile_disc": _reduced_percentile,
    "first_by": _reduced_first,
    "last_by": _reduced_first,
    "top_k": _reduced_top,
    "approx_count_distinct": _reduced_distinct,
}

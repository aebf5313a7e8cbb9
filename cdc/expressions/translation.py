"""An expression of Postgres as SQL of DuckDB with the same value, and its type.

The types of parts are DuckDB's own answers, so the decisions below rest on what is evaluated later, not on a second
opinion about it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import duckdb
from sqlglot import exp

from cdc.expressions import engine
from cdc.expressions.column_types import (
    BPCHAR,
    MAX_PRECISION,
    NUMERIC,
    duckdb_name,
    is_opaque,
    normal_name,
    postgres_name,
)
from cdc.expressions.expression import Expression, column_name

_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT")
_FLOATS = ("REAL", "DOUBLE")
_COMPARISONS = (
    exp.EQ,
    exp.NEQ,
    exp.GT,
    exp.GTE,
    exp.LT,
    exp.LTE,
    exp.NullSafeEQ,
    exp.NullSafeNEQ,
    exp.Between,
    exp.In,
)
_COMPARED_AS = f"DECIMAL({MAX_PRECISION},18)"
"""How a numeric without precision is compared: exactly, up to 18 decimals. A value of 10^20 or more does not fit, and
its row fails; as a double it would silently equal its neighbours."""
_EXTRACTED = {
    **dict.fromkeys(
        ("YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "QUARTER", "WEEK", "DOY", "DOW", "ISODOW", "ISOYEAR"), "INTEGER"
    ),
    "EPOCH": "DECIMAL(20,6)",
}
_SIDES = ("this", "expression")
_READ_FROM_TEXT = ("UUID", "JSON", "TIME")
_OTHER_ESCAPES = re.compile(r"\\[bBmMyYZ]")
_DIGITS = {"TINYINT": 5, "SMALLINT": 5, "INTEGER": 10, "BIGINT": 19}
_CASTS = {
    "SMALLINT": "SMALLINT",
    "INT": "INTEGER",
    "BIGINT": "BIGINT",
    "FLOAT": "REAL",
    "DOUBLE": "DOUBLE",
    "BOOLEAN": "BOOLEAN",
    "TEXT": "VARCHAR",
    "VARCHAR": "VARCHAR",
    "DATE": "DATE",
    "TIMESTAMP": "TIMESTAMP",
    "TIMESTAMPTZ": "TIMESTAMPTZ",
    "UUID": "UUID",
}
_CAST_NAMES = (
    "smallint, int, bigint, real, double precision, numeric(p,s), boolean, text, varchar(n), date, timestamp, \
timestamptz, uuid"
)


@dataclass(frozen=True, slots=True)
class Translated:
    """SQL over the columns `c0`, `c1`, … of `Inputs`, and the type of its value."""

    sql: str
    type: str
    as_text: bool = False
    """Whether the SQL gives the value's text, as `cdc.expressions.values` reads it: a column that is passed on."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The columns that expressions read: their types by name. In DuckDB they are named `c0`, `c1`, …, because DuckDB
    ignores the case of names and Postgres does not."""

    types: Mapping[str, str]

    def place(self, name: str) -> str:
        """The column's name in DuckDB."""
        return f"c{list(self.types).index(name)}"

    def value(self, name: str) -> str:
        """SQL for the column's value, of its type: some columns arrive as texts (`cdc.expressions.values`)."""
        place, type_ = self.place(name), self.types[name]
        if type_.endswith("[]"):
            return f"CAST(CAST({place} AS JSON) AS {type_})"
        return f"CAST({place} AS {type_})" if type_ in _READ_FROM_TEXT else place

    def empty(self) -> str:
        """A relation without rows, to ask DuckDB for the type of an expression."""
        casts = [f"CAST(NULL AS {self.arrives_as(type_)}) AS c{at}" for at, type_ in enumerate(self.types.values())]
        return f"(SELECT {', '.join(casts) or '1 AS none'})"

    @staticmethod
    def arrives_as(type_: str) -> str:
        """The type that DuckDB gets for a column of this type: texts, for some."""
        return "VARCHAR" if type_.endswith("[]") or type_ in _READ_FROM_TEXT else duckdb_name(type_)


def translate(expression: Expression, inputs: Inputs) -> Translated:
    """Raises ConfigError for unknown columns, and for types for which DuckDB's value would not be Postgres's."""
    if expression.column is not None:
        _known(expression, expression.tree, inputs)
        type_ = inputs.types[expression.column]
        return Translated(inputs.place(expression.column), type_, Inputs.arrives_as(type_) != type_)
    work = _Translation(expression, inputs)
    root = exp.Paren(this=expression.tree.copy())
    for node in reversed(list(root.walk())):  # parts before the whole
        work.replace(node)
    type_ = work.type_of(root)
    if type_.startswith("JSON"):
        message = "a part of a JSON value is written in another way by Postgres."
        raise expression.error(message, "Take a text out of it: payload ->> 'name'", expression.tree)
    return Translated(root.sql("duckdb"), type_)


def _known(expression: Expression, column: exp.Expr, inputs: Inputs) -> str:
    name = column_name(column) if isinstance(column, exp.Column) else ""
    if name not in inputs.types:
        near = get_close_matches(name, inputs.types, 3)
        remedy = f"Did you mean {' or '.join(near)}? " if near else ""
        raise expression.error(f"unknown column {name!r}.", f"{remedy}Columns: {', '.join(inputs.types)}.", column)
    return name


class _Translation:
    """Replaces parts of one expression's tree, and knows the types of the replaced ones."""

    def __init__(self, expression: Expression, inputs: Inputs) -> None:
        self._expression = expression
        self._inputs = inputs
        self._connection = engine.cursor()

    def replace(self, node: exp.Expr) -> None:
        """Replace a node whose parts were replaced before."""
        rule = _RULES.get(type(node))
        new = rule(self, node) if rule is not None else node
        if new is not node:
            new.meta.update(next((part.meta for part in node.walk(bfs=False) if "start" in part.meta), {}))
            node.replace(new)

    def type_of(self, node: exp.Expr) -> str:
        """DuckDB's type of a translated part."""
        query = f"DESCRIBE SELECT {node.sql('duckdb')} AS value FROM {self._inputs.empty()}"  # noqa: S608
        try:
            described = self._connection.execute(query).fetchall()[0][1]
        except duckdb.Error as error:
            raise self._expression.error(
                f"the types do not fit together: {_reason(error)}.",
                "Cast one side, for instance: amount::numeric(12,2)",
                node,
            ) from None
        return normal_name(str(described))

    # -- rules, by construct

    def condition(self, node: exp.Expr) -> exp.Expr:
        """Parts of AND, OR and NOT are boolean; DuckDB would cast them."""
        for part in (node.args["this"], node.args.get("expression")):
            if part is not None and not isinstance(part, exp.Null):
                self._require(part, part, ("BOOLEAN",))
        return node

    def comparison(self, node: exp.Expr) -> exp.Expr:
        """Both sides have one type, or one is a literal that can be read as the other's; DuckDB would cast the text of
        each row."""
        if isinstance(node.args.get("expression"), exp.Any):
            return self.membership(node)
        sides = [node.args["this"], *(node.args.get(name) for name in ("expression", "low", "high")), *node.expressions]
        parts = [part for part in sides if part is not None]
        literals = [part for part in parts if isinstance(part, exp.Literal) and part.is_string]
        types = [self.type_of(part) for part in parts if part not in literals and not isinstance(part, exp.Null)]
        if "VARCHAR" in types and set(types) != {"VARCHAR"}:
            other = next(type_ for type_ in types if type_ != "VARCHAR")
            message = f"text is compared with {postgres_name(other)}."
            raise self._expression.error(message, "Cast one side.", node)
        for literal in literals if types else ():
            if not self._reads_as(literal, types[0]):
                message = f"{literal.sql('postgres')[:60]} is no {postgres_name(types[0])}."
                raise self._expression.error(message, "Compare with a value of the column's type.", node)
        return node

    def _reads_as(self, literal: exp.Expr, type_: str) -> bool:
        try:
            self._connection.execute(f"SELECT CAST({literal.sql('duckdb')} AS {type_})").fetchall()
        except duckdb.Error:
            return False
        return True

    def membership(self, node: exp.Expr) -> exp.Expr:
        """`value = ANY (array)`, null as in Postgres where the array or one of its other elements is."""
        value, array = node.args["this"], node.args["expression"].args["this"]
        if not isinstance(node, exp.EQ):
            raise self._expression.error("ANY is available with = only.", "Write value = ANY (array).", node)
        self.type_of(
            exp.EQ(this=value.copy(), expression=exp.Bracket(this=array.copy(), expressions=[exp.Literal.number(1)]))
        )
        one, all_ = value.sql("duckdb"), array.sql("duckdb")
        unknown = f"{all_} IS NULL OR {one} IS NULL"
        some_null = f"len(list_filter({all_}, lambda e: e IS NULL)) > 0"
        return _raw(
            f"(CASE WHEN {unknown} THEN NULL WHEN list_contains({all_}, {one}) THEN true"
            f" WHEN {some_null} THEN NULL ELSE false END)"
        )

    def sum_or_difference(self, node: exp.Expr) -> exp.Expr:
        """A difference of dates is an integer in Postgres; a real with another number is calculated in doubles."""
        types = [self.type_of(node.args[side]) for side in _SIDES]
        if isinstance(node, exp.Sub) and types == ["DATE", "DATE"]:
            return exp.cast(exp.Paren(this=node.copy()), "INT")
        if "REAL" in types and types != ["REAL", "REAL"]:
            return type(node)(**{side: exp.cast(node.args[side].copy(), "DOUBLE") for side in _SIDES})
        return node

    def product(self, node: exp.Expr) -> exp.Expr:
        """Of decimals, with room for all digits: DuckDB stops at 18, unless a factor has more."""
        if (new := self.sum_or_difference(node)) is not node:
            return new
        left, right = (_decimal_size(self.type_of(node.args[side])) for side in _SIDES)
        if left is None or right is None or not left[1] + right[1] or left[0] + right[0] <= 18:
            return node
        digits, scale = min(left[0] + right[0], MAX_PRECISION), left[1] + right[1]
        wide = exp.cast(node.args["this"].copy(), f"DECIMAL({digits},{left[1]})")
        product = exp.Mul(this=wide, expression=node.args["expression"].copy())
        return exp.cast(exp.Paren(this=product), f"DECIMAL({digits},{scale})")

    def column(self, node: exp.Expr) -> exp.Expr:
        name = _known(self._expression, node, self._inputs)
        type_, here = self._inputs.types[name], _raw(self._inputs.value(name))
        if type_ == NUMERIC:
            return self._number(name, node, here)
        if is_opaque(type_):
            return self._opaque(name, node, here)
        return exp.Trim(this=here, position="TRAILING") if type_ == BPCHAR else here

    def _number(self, name: str, node: exp.Expr, here: exp.Expr) -> exp.Expr:
        """A numeric without precision, as text: cast by the expression, or compared."""
        parent = node.find_ancestor(exp.Expr)
        while isinstance(parent, exp.Paren):
            parent = parent.parent
        if isinstance(parent, (exp.Cast, exp.Is)):
            return here
        if isinstance(parent, _COMPARISONS):
            return exp.cast(here, _COMPARED_AS)
        raise self._expression.error(
            f"column {name} is numeric without precision, which cannot be calculated with.",
            f"Cast it to numeric(p,s), for instance: {name}::numeric(18,4)",
            node,
        )

    def _opaque(self, name: str, node: exp.Expr, here: exp.Expr) -> exp.Expr:
        parent = node.parent
        if isinstance(parent, exp.Is) or (isinstance(parent, exp.Cast) and parent.to.this.name in ("TEXT", "VARCHAR")):
            return here
        pg = postgres_name(self._inputs.types[name])
        raise self._expression.error(
            f"column {name} is {pg}, which expressions have as text only.", f"Cast it: {name}::text", node
        )

    def literal(self, node: exp.Expr) -> exp.Expr:
        """A number of Postgres's type: DuckDB would give it the type of the other side, and overflow earlier."""
        if not isinstance(node, exp.Literal) or node.is_string or not node.name.isdigit():
            return node
        if isinstance(node.parent, (exp.DataTypeParam, exp.JSONPathSubscript, exp.Interval, exp.Round)):
            return node
        if int(node.name) >= 1 << 63:
            return exp.cast(node.copy(), f"DECIMAL({MAX_PRECISION},0)")
        return exp.cast(node.copy(), "INT" if int(node.name) < 1 << 31 else "BIGINT")

    def division(self, node: exp.Expr) -> exp.Expr:
        """Integers are divided as in Postgres, toward zero; and a division by zero fails, also of doubles."""
        left, right = node.args["this"], node.args["expression"]
        types = {self.type_of(left), self.type_of(right)}
        if types <= set(_WHOLE):
            return exp.Paren(this=exp.IntDiv(this=left.copy(), expression=right.copy()))
        if not types & set(_FLOATS):
            raise self._expression.error(
                "a division of numerics has no fixed number of decimals.",
                "Divide doubles, and cast the result: (a::double precision / b)::numeric(12,2)",
                node,
            )
        a, b = (f"CAST({part.sql('duckdb')} AS DOUBLE)" for part in (left, right))
        fails = f"CAST(1 // CAST({b} AS INTEGER) AS DOUBLE)"
        return exp.Paren(this=_raw(f"CASE WHEN {b} = 0 THEN {fails} ELSE {a} / {b} END"))

    def cast(self, node: exp.Expr) -> exp.Expr:
        """To the type of that name in Postgres; refused where the two print or read values differently."""
        inner, to = node.args["this"], node.args["to"]
        wanted = self._wanted(node, to)
        given = self.type_of(inner)
        if wanted == "VARCHAR" and (given in _FLOATS or given in ("BLOB", "INTERVAL") or given.endswith("[]")):
            raise self._expression.error(
                f"a {postgres_name(given)} as text is written in another way by Postgres.",
                "Cast it to numeric(p,s) first, or keep the column as it is.",
                node,
            )
        source = inner.sql("duckdb")
        if wanted in _WHOLE and given == "VARCHAR":  # DuckDB would round 1.5 and read 1e3
            whole = f"{source} IS NULL OR regexp_full_match({source}, '\\s*[+-]?[0-9]+\\s*')"
            source = f"CASE WHEN {whole} THEN {source} ELSE '' END"
        if wanted == "VARCHAR" and given == "BOOLEAN":
            return _raw(f"CAST({source} AS VARCHAR)")
        length = to.expressions[0].name if wanted == "VARCHAR" and to.expressions else ""
        cast = f"CAST({source} AS {wanted})"
        return _raw(f"left({cast}, {int(length)})" if length else cast)

    def _wanted(self, node: exp.Expr, to: exp.Expr) -> str:
        name = to.this.name if isinstance(to.this, exp.DType) else ""
        sizes = [parameter.name for parameter in to.expressions]
        if name in ("DECIMAL", "NUMERIC") and sizes:
            precision, scale = int(sizes[0]), int(sizes[1]) if len(sizes) > 1 else 0
            if scale <= precision <= MAX_PRECISION:
                return f"DECIMAL({precision},{scale})"
        elif name in _CASTS:
            return _CASTS[name]
        raise self._expression.error(
            f"a cast to {to.sql('postgres').lower()} is not available.",
            f"Available types: {_CAST_NAMES} (p up to {MAX_PRECISION}).",
            node,
        )

    def text(self, node: exp.Expr) -> exp.Expr:
        """Concatenated values must be texts or whole numbers: others are written in another way by Postgres."""
        parts = node.expressions or [node.args["this"], node.args["expression"]]
        for part in parts:
            if (given := self.type_of(part)) not in ("VARCHAR", *_WHOLE):
                raise self._expression.error(
                    f"a {postgres_name(given)} in a text.", "Cast it to text, or to numeric(p,s) and then text.", node
                )
        return node

    def like(self, node: exp.Expr) -> exp.Expr:
        """A backslash escapes, unless ESCAPE says another."""
        if isinstance(node.parent, exp.Escape):
            return node
        return exp.Escape(this=node.copy(), expression=exp.Literal.string("\\"))

    def pattern(self, node: exp.Expr) -> exp.Expr:
        """A point matches a line break too. Refused is what DuckDB's regular expressions lack or read otherwise."""
        pattern = node.args["expression"]
        written = isinstance(pattern, exp.Literal) and pattern.is_string
        if not written or _OTHER_ESCAPES.search(pattern.name):
            message = "the pattern must be written here, and without \\b and \\B, which mean other things."
            raise self._expression.error(message, "For instance: name ~ '^[a-z]+$'", node)
        options = "is" if isinstance(node, exp.RegexpILike) else "s"
        matches = f"regexp_matches({{}}, {pattern.sql('duckdb')}, '{options}')"
        try:
            self._connection.execute(f"SELECT {matches.format(repr(''))}").fetchall()
        except duckdb.Error as error:
            raise self._expression.error(f"the pattern: {_reason(error)}.", "Write it otherwise.", node) from None
        return _raw(matches.replace("{}", node.args["this"].sql("duckdb"), 1))

    def substring(self, node: exp.Expr) -> exp.Expr:
        """Places before the first count, in Postgres, and are empty; in DuckDB they are counted from the end."""
        text, length = node.args["this"].sql("duckdb"), node.args.get("length")
        start = node.args["start"].sql("duckdb")
        self._require(node, node.args["this"], ("VARCHAR",))
        if length is None:
            return _raw(f"substring({text}, greatest({start}, 1))")
        if _written_number(length) is None:
            raise self._expression.error("the length must be written as a number.", "For instance: 3", node)
        here = f"greatest({start}, 1)"
        return _raw(f"substring({text}, {here}, greatest({start} + {length.sql('duckdb')} - {here}, 0))")

    def part(self, node: exp.Expr) -> exp.Expr:
        """split_part: an empty separator and the part 0 mean other things in DuckDB."""
        separator, number = node.args["delimiter"], _written_number(node.args["part_index"])
        if not (isinstance(separator, exp.Literal) and separator.name) or not number:
            message = "split_part needs a separator and the number of a part, both written here."
            raise self._expression.error(message, "For instance: split_part(email, '@', 2)", node)
        return node

    def whole(self, node: exp.Expr) -> exp.Expr:
        """Lengths and places are integers in Postgres, and bigint in DuckDB."""
        self._require(node, node.args["this"], ("VARCHAR",))
        return exp.cast(node.copy(), "INT")

    def rounded(self, node: exp.Expr) -> exp.Expr:
        """A double is rounded to the even neighbour."""
        if self.type_of(node.args["this"]) not in _FLOATS:
            return node
        if node.args.get("decimals") is not None:
            message = "round of a double has no number of decimals in Postgres."
            raise self._expression.error(message, "Cast it: round(amount::numeric(18,4), 2)", node)
        return _raw(f"round_even({node.args['this'].sql('duckdb')}, 0)")

    def extracted(self, node: exp.Expr) -> exp.Expr:
        field = str(node.args["this"].name).upper()
        if field not in _EXTRACTED:
            raise self._expression.error(
                f"extract({field.lower()} …) is not available.", f"Available: {', '.join(_EXTRACTED).lower()}.", node
            )
        self._require(node, node.args["expression"], ("DATE", "TIMESTAMP", "TIMESTAMPTZ"))
        inner = node.args["expression"].sql("duckdb")
        return _raw(f"CAST(EXTRACT({field} FROM {inner}) AS {_EXTRACTED[field]})")

    def truncated_time(self, node: exp.Expr) -> exp.Expr:
        """A date becomes a timestamptz, as in Postgres."""
        if self.type_of(node.args["this"]) == "DATE":
            node.args["this"].replace(exp.cast(node.args["this"].copy(), "TIMESTAMPTZ"))
        return node

    def path(self, node: exp.Expr) -> exp.Expr:
        if not isinstance(node.args["expression"], exp.JSONPath):
            message = "the name of a JSON member must be written in the expression."
            raise self._expression.error(message, "For instance: payload ->> 'name'", node)
        self._require(node, node.args["this"], ("JSON",))
        return exp.Paren(this=node.copy())

    def _require(self, node: exp.Expr, part: exp.Expr, allowed: tuple[str, ...]) -> None:
        if (given := self.type_of(part)) not in allowed:
            names = " or ".join(postgres_name(name) for name in allowed)
            message = f"{names} is needed here, not {postgres_name(given)}."
            raise self._expression.error(message, "Cast the value.", node)


def _written_number(node: exp.Expr) -> int | None:
    """The value of a translated integer literal, None for anything else."""
    if isinstance(node, exp.Neg):
        inner = _written_number(node.this)
        return None if inner is None else -inner
    literal = node.this if isinstance(node, exp.Cast) else node
    is_number = isinstance(literal, exp.Literal) and not literal.is_string and literal.name.isdigit()
    return int(literal.name) if is_number else None


def _decimal_size(type_: str) -> tuple[int, int] | None:
    """Digits and decimals of an exact number; None for other types."""
    if type_ in _DIGITS:
        return _DIGITS[type_], 0
    if not type_.startswith("DECIMAL("):
        return None
    precision, _, scale = type_.removeprefix("DECIMAL(").rstrip(")").partition(",")
    return int(precision), int(scale)


def _raw(sql: str) -> exp.Expr:
    """SQL of DuckDB that is already right, as a part of a tree."""
    return exp.column(exp.to_identifier(sql, quoted=False))


_RULES: Mapping[type[exp.Expr], Callable[[_Translation, exp.Expr], exp.Expr]] = {
    **dict.fromkeys(_COMPARISONS, _Translation.comparison),
    **dict.fromkeys((exp.And, exp.Or, exp.Not), _Translation.condition),
    exp.Cast: _Translation.cast,
    exp.Column: _Translation.column,
    exp.Concat: _Translation.text,
    exp.ConcatWs: _Translation.text,
    exp.DPipe: _Translation.text,
    exp.Div: _Translation.division,
    exp.Extract: _Translation.extracted,
    exp.JSONExtract: _Translation.path,
    exp.JSONExtractScalar: _Translation.path,
    exp.ILike: _Translation.like,
    exp.Length: _Translation.whole,
    exp.Like: _Translation.like,
    exp.Literal: _Translation.literal,
    exp.Mul: _Translation.product,
    exp.RegexpILike: _Translation.pattern,
    exp.RegexpLike: _Translation.pattern,
    exp.Round: _Translation.rounded,
    exp.SplitPart: _Translation.part,
    exp.StrPosition: _Translation.whole,
    exp.Add: _Translation.sum_or_difference,
    exp.Sub: _Translation.sum_or_difference,
    exp.Substring: _Translation.substring,
    exp.TimestampTrunc: _Translation.truncated_time,
}


def _reason(error: duckdb.Error) -> str:
    """The first line of DuckDB's message: it names types, and literals of the expression."""
    line = str(error).strip().splitlines()[0]
    return line.split("Error: ", 1)[-1].rstrip(".")[:200]

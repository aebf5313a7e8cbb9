"""What expressions may contain: constructs and functions whose value in DuckDB is Postgres's.

`tests/integration/expressions/` computes each of them in Postgres and here. A function that is not listed is refused,
however harmless: many have the same name in both and another value (`initcap`, `to_char`, `round` of a double).
"""

from sqlglot import exp

CONSTRUCTS: frozenset[type[exp.Expr]] = frozenset(
    {
        exp.Add,
        exp.And,
        exp.Any,
        exp.Array,
        exp.AtTimeZone,
        exp.Between,
        exp.Boolean,
        exp.Bracket,
        exp.Case,
        exp.Cast,
        exp.Column,
        exp.DPipe,
        exp.DataType,
        exp.DataTypeParam,
        exp.Div,
        exp.EQ,
        exp.Escape,
        exp.GT,
        exp.GTE,
        exp.ILike,
        exp.Identifier,
        exp.If,
        exp.In,
        exp.Interval,
        exp.Is,
        exp.JSONExtract,
        exp.JSONExtractScalar,
        exp.JSONPath,
        exp.JSONPathKey,
        exp.JSONPathRoot,
        exp.JSONPathSubscript,
        exp.LT,
        exp.LTE,
        exp.Like,
        exp.Literal,
        exp.Mod,
        exp.Mul,
        exp.NEQ,
        exp.Neg,
        exp.Not,
        exp.Null,
        exp.NullSafeEQ,
        exp.NullSafeNEQ,
        exp.Or,
        exp.Paren,
        exp.RegexpILike,
        exp.RegexpLike,
        exp.Sub,
        exp.Var,
    }
)
"""Operators, literals, casts and the parts that they consist of."""

FUNCTIONS: dict[type[exp.Expr], str] = {
    exp.Abs: "abs",
    exp.Ceil: "ceil",
    exp.Coalesce: "coalesce",
    exp.Concat: "concat",
    exp.ConcatWs: "concat_ws",
    exp.Extract: "extract",
    exp.Floor: "floor",
    exp.Greatest: "greatest",
    exp.Least: "least",
    exp.Left: "left",
    exp.Length: "length",
    exp.Lower: "lower",
    exp.MD5: "md5",
    exp.Nullif: "nullif",
    exp.Replace: "replace",
    exp.Reverse: "reverse",
    exp.Right: "right",
    exp.Round: "round",
    exp.SplitPart: "split_part",
    exp.StartsWith: "starts_with",
    exp.StrPosition: "strpos",
    exp.Substring: "substring",
    exp.TimestampTrunc: "date_trunc",
    exp.Trim: "trim",
    exp.Upper: "upper",
}
FUNCTION_NAMES = sorted({*FUNCTIONS.values(), "btrim", "ltrim", "rtrim", "mod", "position"})

AGGREGATES: frozenset[type[exp.Expr]] = frozenset({exp.Sum, exp.Count, exp.Min, exp.Max, exp.Avg, exp.Star})
"""Accepted only where the caller groups rows."""

UNSTABLE: frozenset[type[exp.Expr]] = frozenset(
    {
        exp.CurrentDate,
        exp.CurrentTime,
        exp.CurrentTimestamp,
        exp.CurrentUser,
        exp.Localtime,
        exp.Localtimestamp,
        exp.Rand,
        exp.Randn,
        exp.SessionUser,
        exp.Uuid,
    }
)
UNSTABLE_NAMES = frozenset(
    {
        "clock_timestamp",
        "currval",
        "gen_random_uuid",
        "nextval",
        "now",
        "pg_sleep",
        "random",
        "random_normal",
        "statement_timestamp",
        "timeofday",
        "transaction_timestamp",
        "txid_current",
        "pg_current_xact_id",
        "uuid_generate_v1",
        "uuid_generate_v4",
        "uuidv4",
        "uuidv7",
    }
)

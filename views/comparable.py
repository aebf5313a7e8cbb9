"""Which values may be compared, by their type in expressions (`cdc.expressions.column_types`). Pure."""

_WHOLE = frozenset({"SMALLINT", "INTEGER", "BIGINT"})
_FLOATS = frozenset({"REAL", "DOUBLE"})
_ORDERED = (
    _WHOLE | _FLOATS | {"BOOLEAN", "DATE", "TIME", "TIMESTAMP", "TIMESTAMPTZ", "UUID", "VARCHAR", "BPCHAR", "BLOB"}
)


def is_ordered(type_: str) -> bool:
    """Whether values are compared as Postgres compares them (texts: by bytes). Not numeric without precision, JSON and
    types of which only the text is known: `1.0` and `1.00` are equal, and their texts are not."""
    return type_ in _ORDERED or type_.startswith("DECIMAL(")


def is_exact(type_: str) -> bool:
    """Whether equal values of one type have equal texts, so that rows can be grouped by them."""
    return is_ordered(type_.removesuffix("[]")) and type_.removesuffix("[]") not in _FLOATS


def have_equal_texts(one: str, other: str) -> bool:
    """Whether equal values of the two types have equal texts, so that rows are found by them. Not char(n): its texts
    have blanks up to n."""
    if {one, other} <= _WHOLE:
        return True
    return one == other and is_exact(one) and one != "BPCHAR"

"""Every type the product claims to carry, with odd values, and the JSON that each must become.

The one source for the tests on a real Postgres and for docs/types.md (`python -m tests.corpus.types` writes it).
Expected texts are written by hand from docs/architecture.md, not taken from the code under test.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETUP = (
    "create extension if not exists citext",
    "create extension if not exists hstore",
    "create extension if not exists ltree",
    "create extension if not exists isn",
    "create type mood as enum ('sad', 'so so', 'ha\"ppy')",
    "create domain positive as int check (value > 0)",
    "create domain small_positive as positive check (value < 100)",
    "create domain word as varchar(20)",
    "create domain numbers as int[]",
    "create type pair as (a int, b text)",
    "create type stretch as range (subtype = float8)",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A type: `values` are (SQL expression, expected JSON text). `note` goes into the documentation."""

    name: str
    values: tuple[tuple[str, str], ...]
    note: str = ""
    arrays: bool = True
    """Whether arrays of it are tried as well."""


def _texts(*values: str) -> tuple[tuple[str, str], ...]:
    """Values whose JSON is a string of exactly their text."""
    return tuple((_literal(value), f'"{value}"') for value in values)


def _numbers(*values: str) -> tuple[tuple[str, str], ...]:
    """Values whose JSON is exactly their text."""
    return tuple((_literal(value), value) for value in values)


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


_SPECIAL = (("'NaN'", '"NaN"'), ("'Infinity'", '"Infinity"'), ("'-Infinity'", '"-Infinity"'))
_LONG = "9" * 500 + "." + "1" * 300

KINDS = (
    Kind("smallint", _numbers("0", "-32768", "32767"), "number"),
    Kind("int", _numbers("0", "-2147483648", "2147483647"), "number"),
    Kind("bigint", _numbers("0", "-9223372036854775808", "9223372036854775807"), "number, all 64 bits"),
    Kind("oid", _numbers("0", "4294967295"), "number"),
    Kind("real", (*_numbers("0", "-0", "1.5", "3.4028235e+38", "1e-45"), *_SPECIAL), "number; NaN, infinities: string"),
    Kind(
        "double precision",
        (*_numbers("0", "-0", "0.1", "1.7976931348623157e+308", "5e-324", "-123456789.123"), *_SPECIAL),
        "number; NaN and infinities: string",
    ),
    Kind("numeric(12,2)", _numbers("0.00", "-1234567890.12", "0.10"), "number with all its digits"),
    Kind("numeric(5)", _numbers("0", "99999"), "number"),
    Kind(
        "numeric",
        (*_numbers("0", "-0.000000000000000000000000001", "100", _LONG), *_SPECIAL,
         ("('1' || repeat('0', 131071))::numeric", "1" + "0" * 131071)),
        "number with all its digits; NaN and infinities: string",
    ),
    Kind("boolean", (("true", "true"), ("false", "false")), "true, false"),
    Kind(
        "text",
        (
            ("''", '""'),
            ("'plain'", '"plain"'),
            ("'NULL'", '"NULL"'),
            ("E'\\\\N'", '"\\\\N"'),
            ("E'tab\\tline\\nreturn\\rback\\bfeed\\f'", '"tab\\tline\\nreturn\\rback\\bfeed\\f"'),
            ("E'\\x01\\x1f\\x7f\\x0b'", '"\\u0001\\u001f\x7f\\u000b"'),
            ("E'q\"uote back\\\\slash sla/sh'", '"q\\"uote back\\\\slash sla/sh"'),
            ("'ünï 😀 \u2028'", '"ünï 😀 \u2028"'),
            ("'{a,b}'", '"{a,b}"'),
            ("E'\\\\\\\\n'", '"\\\\\\\\n"'),
            ("'{\"not\": \"json\"}'", '"{\\"not\\": \\"json\\"}"'),
            ("repeat('x', 9000)", '"' + "x" * 9000 + '"'),
        ),
        "string",
    ),
    Kind("varchar(10)", _texts("", "ten chars!"), "string"),
    Kind("char(5)", _texts("ab   ", "     "), "string, padded with blanks as Postgres pads it"),
    Kind('"char"', _texts("a", ""), "string"),
    Kind("name", _texts("pg_class"), "string"),
    Kind("citext", _texts("MiXed"), "string"),
    Kind(
        "bytea",
        (("''", '""'), ("'\\x00'", '"AA=="'), ("'\\x0001'", '"AAE="'), ("'\\x000102'", '"AAEC"'),
         ("'\\xdeadbeef00ff'", '"3q2+7wD/"'), ("'\\x5c4e'", '"XE4="')),
        "string, base64",
    ),
    Kind("bit(1)", _texts("1", "0"), "string of 0 and 1"),
    Kind("bit(7)", _texts("1010101")),
    Kind("bit(64)", _texts("10" * 32)),
    Kind("varbit", _texts("", "101"), "string of 0 and 1"),
    Kind("money", _texts("$12.34", "-$12.34", "$1,234.56"), "string, with lc_monetary C"),
    Kind(
        "date",
        _texts("2024-02-29", "0001-01-01", "0044-03-15 BC", "5874897-12-31", "infinity", "-infinity", "1500-02-28"),
        "string, ISO 8601; infinity, BC and large years as Postgres writes them",
    ),
    Kind("time", _texts("00:00:00", "23:59:59.999999", "24:00:00", "12:00:00.5"), "string, ISO 8601"),
    Kind("time(0)", _texts("12:34:56")),
    Kind("timetz", _texts("10:00:00+02", "10:00:00.25-03:30", "24:00:00+00"), "string, ISO 8601, offset kept"),
    Kind(
        "timestamp",
        (
            ("'2024-01-31 10:00:00.5'", '"2024-01-31T10:00:00.5"'),
            ("'2024-01-31 10:00:00'", '"2024-01-31T10:00:00"'),
            ("'1500-01-01 00:00:00.000001'", '"1500-01-01T00:00:00.000001"'),
            ("'0044-03-15 12:00:00 BC'", '"0044-03-15T12:00:00 BC"'),
            ("'294276-12-31 23:59:59.999999'", '"294276-12-31T23:59:59.999999"'),
            ("'21016-01-01 00:00:00'", '"21016-01-01T00:00:00"'),
            ("'infinity'", '"infinity"'),
            ("'-infinity'", '"-infinity"'),
        ),
        "string, ISO 8601 with T",
    ),
    Kind("timestamp(0)", (("'2024-01-31 10:00:00'", '"2024-01-31T10:00:00"'),)),
    Kind("timestamp(3)", (("'2024-01-31 10:00:00.123'", '"2024-01-31T10:00:00.123"'),)),
    Kind(
        "timestamptz",
        (
            ("'2024-01-31 10:00:00.5+02'", '"2024-01-31T08:00:00.5Z"'),
            ("'2024-01-31 10:00:00+00'", '"2024-01-31T10:00:00Z"'),
            ("'0044-03-15 12:00:00+00 BC'", '"0044-03-15T12:00:00Z BC"'),
            ("'294276-12-31 23:59:59.999999+00'", '"294276-12-31T23:59:59.999999Z"'),
            ("'infinity'", '"infinity"'),
            ("'-infinity'", '"-infinity"'),
        ),
        "string, ISO 8601 in UTC with T and Z",
    ),
    Kind("timestamptz(3)", (("'2024-01-31 10:00:00.120+00'", '"2024-01-31T10:00:00.12Z"'),)),
    Kind(
        "interval",
        (("'1 year 2 mons 3 days 04:05:06.7'", '"P1Y2M3DT4H5M6.7S"'), ("'-1 day'", '"P-1D"'), ("'0'", '"PT0S"')),
        "string, ISO 8601 duration",
    ),
    Kind("uuid", _texts("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"), "string"),
    Kind(
        "json",
        (
            ("'{\"b\" : 1, \"b\":2,\"a\":[ ]}'", '{"b" : 1, "b":2,"a":[ ]}'),
            ("E'[1,\\n\\t2,\\r\\n3]'", "[1,  2,  3]"),
            ("'1e400'", "1e400"),
            ("'\"\\u0000 \\u2028\"'", '"\\u0000 \\u2028"'),
            ("'null'", "null"),
            ("repeat('[', 100)::text || repeat(']', 100)", "[" * 100 + "]" * 100),
        ),
        "embedded as it is; line breaks between tokens become blanks",
        arrays=False,
    ),
    Kind(
        "jsonb",
        (
            ("'{\"b\":1,\"a\":[1,2.50,null,true,\"x\\ny\"]}'", '{"a": [1, 2.50, null, true, "x\\ny"], "b": 1}'),
            ("'1e400'", "1" + "0" * 400),
            ("'\"s\"'", '"s"'),
            ("'null'", "null"),
        ),
        "embedded as it is",
        arrays=False,
    ),
    Kind("xml", _texts("<a>b</a>"), "string"),
    Kind("inet", _texts("192.168.0.1", "10.0.0.0/8", "::1"), "string"),
    Kind("cidr", _texts("10.0.0.0/8", "2001:db8::/32"), "string"),
    Kind("macaddr", _texts("08:00:2b:01:02:03"), "string"),
    Kind("macaddr8", _texts("08:00:2b:01:02:03:04:05"), "string"),
    Kind("point", _texts("(1,2.5)"), "string, as Postgres writes it"),
    Kind("line", _texts("{1,-2,3}"), "string"),
    Kind("lseg", _texts("[(1,2),(3,4)]"), "string"),
    Kind("box", _texts("(3,4),(1,2)"), "string"),
    Kind("path", _texts("((1,2),(3,4))", "[(1,2),(3,4)]"), "string"),
    Kind("polygon", _texts("((1,2),(3,4),(5,6))"), "string"),
    Kind("circle", _texts("<(1,2),3>"), "string"),
    Kind("int4range", _texts("[1,10)", "empty", "(,5)", "(,)"), "string, as Postgres writes it"),
    Kind("int8range", _texts("[1,10)"), "string"),
    Kind("numrange", _texts("[1.5,2.5]"), "string"),
    Kind("daterange", _texts("[2024-01-01,2024-02-01)"), "string"),
    Kind(
        "tsrange",
        (("'[2024-01-01 00:00:00,infinity)'", '"[\\"2024-01-01 00:00:00\\",infinity)"'),),
        "string, as Postgres writes it",
    ),
    Kind(
        "tstzrange",
        (("'[2024-01-01 00:00:00+00,)'", '"[\\"2024-01-01 00:00:00+00\\",)"'),),
        "string, as Postgres writes it",
    ),
    Kind("stretch", _texts("[1.5,2.5)"), "string (a range type of one's own)"),
    Kind("int4multirange", _texts("{}", "{[1,3),[5,7)}"), "string"),
    Kind("datemultirange", _texts("{[2024-01-01,2024-02-01)}"), "string"),
    Kind("tsvector", _texts("'a':1 'fat':2,4"), "string"),
    Kind("tsquery", _texts("'fat' & 'rat'"), "string"),
    Kind("ltree", _texts("top.science"), "string"),
    Kind("isbn", _texts("0-901690-54-6"), "string"),
    Kind(
        "hstore",
        (
            ("''", '""'),
            ("hstore(array['a','1','b',null])", '"\\"a\\"=>\\"1\\", \\"b\\"=>NULL"'),
            ("hstore('q\"', E'\\\\')", '"\\"q\\\\\\"\\"=>\\"\\\\\\\\\\""'),
        ),
        "string, as Postgres writes it",
    ),
    Kind("mood", (("'sad'", '"sad"'), ("'so so'", '"so so"'), ("'ha\"ppy'", '"ha\\"ppy"')), "string (enum)"),
    Kind("positive", _numbers("7"), "as its base type (domain)"),
    Kind("small_positive", _numbers("8"), "as its base type (domain of a domain)"),
    Kind("word", _texts("domain"), "as its base type (domain)"),
    Kind("numbers", (("'{1,NULL}'", "[1,null]"),), "as its base type (domain of an array)", arrays=False),
    Kind("pair", (("row(1, 'x y')", '"(1,\\"x y\\")"'), ("row(null, null)", '"(,)"')), "string (composite)"),
    Kind("int2vector", _texts("1 2 3"), "string", arrays=False),
    Kind("oidvector", _texts("1 2 3"), "string", arrays=False),
    Kind("regclass", _texts("pg_class"), "string"),
    Kind("pg_lsn", _texts("16/B374D848"), "string"),
    Kind("xid", _texts("4294967295"), "string"),
)  # fmt: skip

ODD_ARRAYS = (
    ("text[]", "array['', 'NULL', null, 'a,b', 'q\"', '{}', E'back\\\\slash', E'line\\nend', ' x ', 'ü']",
     '["","NULL",null,"a,b","q\\"","{}","back\\\\slash","line\\nend"," x ","ü"]'),
    ("text[]", "array[array['a','b'],array['c d',null]]", '[["a","b"],["c d",null]]'),
    ("int[]", "'[2:3]={7,8}'", '"[2:3]={7,8}"'),
    ("int[]", "'{{1,2},{3,NULL}}'", "[[1,2],[3,null]]"),
    ("int[]", "'{{{{{{1}}}}}}'", "[[[[[[1]]]]]]"),
    ("int[]", "'[-1:0][2:3]={{1,2},{3,4}}'", '"[-1:0][2:3]={{1,2},{3,4}}"'),
    ("double precision[]", "'{NaN,1e300,-Infinity,NULL}'", '["NaN",1e+300,"-Infinity",null]'),
    ("jsonb[]", "array['{\"a\": [1]}'::jsonb, null, '\"x,y\"']", '[{"a": [1]},null,"x,y"]'),
    ("json[]", "array[E'{\"a\":\\n1}'::json]", '[{"a": 1}]'),
    ("bytea[]", "array['\\xff00'::bytea, '', null]", '["/wA=","",null]'),
    ("box[]", "array['((1,2),(3,4))'::box, '((5,6),(7,8))']", '["(3,4),(1,2)","(7,8),(5,6)"]'),
    ("pair[]", "array[row(1, 'a,b')::pair, null]", '["(1,\\"a,b\\")",null]'),
)  # fmt: skip
"""(type, expression, expected JSON): what the systematic arrays do not reach."""

ABSENT = ("postgis geometry", "pgvector vector")
"""Types of extensions that are not part of Postgres: carried as their text, tried where they are installed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One column of the corpus table with its values, top to bottom."""

    column: str
    type: str
    values: tuple[tuple[str, str], ...]


def cases() -> Iterator[Case]:
    """Every column: each type, an array of each, and the odd arrays."""
    for number, kind in enumerate(KINDS):
        yield Case(f"c{number}", kind.name, kind.values)
        if kind.arrays:
            yield Case(f"a{number}", f"{kind.name}[]", tuple(_arrays(kind)))
    for number, (name, expression, expected) in enumerate(ODD_ARRAYS):
        yield Case(f"o{number}", name, ((expression, expected),))


def _arrays(kind: Kind) -> Iterator[tuple[str, str]]:
    """Empty, every value and a NULL, and two dimensions. Expected: the elements' own JSON between brackets."""
    yield f"'{{}}'::{kind.name}[]", "[]"
    elements = [f"({expression})::{kind.name}" for expression, _ in kind.values]
    texts = [expected for _, expected in kind.values]
    yield f"array[{', '.join([*elements, 'null'])}]", f"[{','.join([*texts, 'null'])}]"
    first, text = elements[0], texts[0]
    yield f"array[array[{first}, null], array[null, {first}]]", f"[[{text},null],[null,{text}]]"


DOCUMENT = Path(__file__).parents[2] / "docs" / "types.md"


def document() -> str:
    """docs/types.md."""
    lines = [
        "# Types",
        "",
        "How each Postgres type stands in a change's JSON. Every line is tried on a real Postgres by",
        "`tests/integration/capture/test_types.py`, through the stream and through the snapshot, with equal bytes.",
        "Generated by `python -m tests.corpus.types`.",
        "",
        "| type | JSON | example |",
        "|---|---|---|",
    ]
    for kind in KINDS:
        if kind.note:
            shown = [f"`{text}`" for _, text in kind.values if 2 < len(text) < 60 or len(kind.values) < 3][:3]
            examples = ", ".join(shown or [f"`{kind.values[0][1]}`"]).replace("|", "\\|")
            lines.append(f"| `{kind.name}` | {kind.note} | {examples} |")
    return "\n".join([*lines, *_REST, ""])


_REST = (
    "| arrays | array of the element's form, any depth, NULL as null | `[[1,2],[3,null]]` |",
    '| arrays with shifted bounds | string: JSON has no place for the bounds | `"[2:3]={7,8}"` |',
    "| any other type | string of its Postgres text | |",
    "",
    "NULL is `null`. A column that the server did not send (unchanged TOAST) is absent and named in `unchanged`.",
    "A `json` or `jsonb` value `null` is `null` too: JSON cannot tell it from NULL.",
    "Not tried, because they are no part of Postgres: " + ", ".join(ABSENT) + "; they come as their text.",
    "",
    "The text of a value depends on session settings; Millrace pins them (`cdc.capture.rows.types.SESSION`).",
)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")

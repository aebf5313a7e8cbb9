"""Every construct and function of expressions has Postgres's value, in the bytes that capture writes for it."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from cdc.capture.rows.mask import Masking
from cdc.config.settings import TableSettings
from cdc.errors import ConfigError
from cdc.expressions.column_types import columns_of
from cdc.expressions.expression import parse
from cdc.expressions.functions import FUNCTION_NAMES
from cdc.expressions.program import compile_program
from cdc.expressions.values import json_cells, typed
from cdc.json_text.members import members
from cdc.model import TableId
from snapshots.tables.rows import Readable, describe, read_images
from tests.corpus.changes import PINNED
from tests.fix_servers import Database

Connection = psycopg.Connection[tuple[Any, ...]]

TABLE = """
create table corpus (id int primary key, s smallint, quantity int, big bigint, price numeric(12,2), n numeric,
  r real, d double precision, ok boolean, name text, code char(5), u uuid, day date, ts timestamp, t timestamptz,
  at time, j jsonb, tags text[], numbers int[], mood mood, ip inet, b bytea)
"""
ROWS = """
insert into corpus values
 (1, 7, 3, 10000000000, 19.90, 1.10, 1.5, 2.5, true, 'Grüße 1,x', 'ab', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11',
  '2024-02-29', '2024-01-31 10:00:00.5', '2024-01-31 10:00:00.25+02', '10:00:00.5',
  '{"a": "x", "c": {"d": "e\\"f"}, "l": ["p", "q"], "n": null}', '{a,"b c",NULL}', '{3,1,2}', 'sad', '10.0.0.1',
  '\\x0001ff'),
 (2, -7, -3, -9, -0.05, -2, -0.25, -3.5, false, '  ', '', null, '1999-12-31', '1999-12-31 23:59:59.999999',
  '1999-12-31 23:59:59+00', '23:59:59', '{}', '{}', '{}', 'so so', null, ''),
 (3, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
  null, null),
 (4, 1, 1000000000, 1, 9999999999.99, 12345678901234567, 1e30, 1e15, true, E'tab\\t"quote" \\\\ and line\\nend',
  'abcde',
  'ffffffff-ffff-ffff-ffff-ffffffffffff', '2100-01-01', '2100-01-01', '2100-01-01', '00:00', '"text"', '{a}', '{1}',
  'sad', '::1', '\\x41')
"""

EXPRESSIONS = """
quantity; s; big; price; n; r; d; ok; name; code; u; day; ts; t; at; tags; numbers; mood; ip; b
quantity + 1; s + s; s + quantity; quantity + big; quantity - s; quantity * s; -quantity; -price; -d
quantity / 2; quantity / 4; (-quantity) / 2; quantity % 2; mod(quantity, 2); (quantity + 1) / s; big / 3
quantity * 2000000000::bigint; price * s; price * price; price + price; price + 1; price * 2; price - 0.5
price * 1.5; quantity * 1.5; price * quantity; price * 100::numeric(38,0)
d * 2; d / 3; d + quantity; d * price; r * 2; d / s; (d * 3)::numeric(20,4)
(price::double precision / s)::numeric(20,4); d::bigint; (d / 1e10)::int;
(price / 10::double precision)::numeric(14,0)::bigint; round(price); round(price, 1)
round(d); floor(price); ceil(price); floor(d); ceiling(d); abs(quantity); abs(price); abs(d)
price::numeric(14,4); price::numeric(14,1); n::numeric(30,5); n::numeric(30,0); quantity::numeric(12,2); d::real
n > 1; n = 1.1; n < -1.5; n between 0 and 2; n in (1.10, 5); n <> price; n is null; n is distinct from 1.1
quantity = 3; quantity <> 3; quantity >= s; price > 19.8; price = 19.9; d = 2.5; quantity in (1, 3); quantity = 3.0
quantity not in (1, 3); quantity between 1 and 5; quantity is distinct from 3; quantity is not distinct from 3
ok; not ok; ok and quantity > 1; ok or quantity > 1; ok is true; ok is not true; ok is false; ok::text
name = 'x'; name like '%1%'; name not like 'G%'; name ilike 'gr%'; name like 'a!%' escape '!'; name ~ '[0-9]'
name !~ '[0-9]'; name ~* 'GR'; lower(name); upper(right(name, 3)); length(name); char_length(name); left(name, 3)
right(name, 3); left(name, -2); right(name, -2); reverse(name); replace(name, 'x', 'yy'); md5(name)
split_part(name, ',', 1); split_part(name, ',', 9); starts_with(name, 'Gr'); strpos(name, 'x')
position('x' in name); substring(name from 2 for 3); substring(name, 2); substr(name, 1, 2); trim(name)
substring(name from 0 for 2); btrim(name, 'x'); ltrim(name); rtrim(name, 'x'); trim(both 'x' from name)
name || 'x'; name || quantity; 'x' || null; concat(name, quantity); concat(name, null)
concat_ws('-', name, null, name)
name::varchar(3); quantity::text; price::text; big::text; day::text; ts::text; u::text; mood::text; code::text
code = 'ab'; code || 'x'; length(code); upper(code)
'12'::int + quantity; ' 12 '::int; '1.5'::numeric(4,2); 'true'::boolean; '2024-01-01'::date; date '2024-01-01'
coalesce(quantity, 0); coalesce(price, 0); coalesce(name, 'none'); nullif(quantity, 3); greatest(quantity, s)
least(price, 1.5); greatest(quantity, null)
case when quantity > 1 then 'many' when ok then 'one' else 'none' end; case quantity when 3 then 1 end
case when ok then price else 0 end; case when ok then quantity end
day + 3; day - 3; day - date '2024-01-01'; day > '2024-01-01'; day + interval '1 month'; ts + interval '1 day'
ts - interval '2 hours 30 minutes'; t + interval '1 day'; t > '2024-01-01'; ts < '2024-01-31 12:00'; ts - ts
t - timestamptz '2024-01-01 00:00:00+00'; interval '1 year 2 months 3 days 4 hours'; interval '-1 day'; t::date
t::timestamp; ts::date; day::timestamp; day::timestamptz; ts::timestamptz; t at time zone 'UTC'
t at time zone 'Europe/Berlin'
ts at time zone 'America/New_York'; date_trunc('day', t); date_trunc('month', ts); date_trunc('week', day)
date_trunc('hour', ts); date_trunc('quarter', ts); date_trunc('year', t)
extract(year from t); extract(month from day); extract(day from ts); extract(hour from t); extract(minute from ts)
extract(quarter from day); extract(week from day); extract(doy from day); extract(dow from day)
extract(isodow from day); extract(isoyear from day); extract(epoch from t); extract(epoch from ts)
date_part('year', ts)
u = 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'; u is null; u in ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11')
j->>'a'; j->'c'->>'d'; j->'l'->>0; j->>'missing'; j->>'n'; j->>'a' = 'x'
tags[1]; tags[2]; tags[9]; 'a' = any(tags); 3 = any(numbers); 'z' = any(tags); not 'z' = any(tags); name = any(tags)
numbers[2]; array[1, 2]; array['a"b', null]
s::int; quantity::double precision; s::real; ok::int; quantity::boolean; name::text; day::timestamptz
'2024-01-31 10:00:00'::timestamp; '2024-01-31 10:00:00+02'::timestamptz; 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'::uuid
interval '1 day' * 2; day + interval '1 day' * s
- (- quantity); - - quantity; quantity /* a comment */ + 1
split_part(name, ',', -1); substring(name, -1, 3); left(name, 0); right(name, 0); greatest(name, 'b')
replace(name, '', 'x')
strpos(name, ''); position('' in name); starts_with(name, ''); trim(''); mod(-7, 3); round(-2.5); ceil(-0.5)
floor(-0.5)
price % 3; 2 between 1 and 3; name = any(array['a', 'x']); case when null then 1 else 2 end; null and ok; null or ok
name ~ '\\d'; name ~ '^\\w+$'; name like '%\\_%'; name ~ 'x|y'; name ~ '[[:digit:]]'; name ~ '^.+$'; name like 'G%e_%'
reverse(name); quantity = 3 and not ok or name is null; -7 / 2; 7 / -2; -7 % 3; 7 % -3; abs(-quantity)
price = 19.90 and d > 1
concat_ws(',', name, ''); concat('a', 1, null); 'a' || 'b' || quantity; substring(name, 0); name ilike 'g%\\\\_%'
name not like 't%\\n%'; substring(name, quantity, 2); split_part('a,b,c', ',', 2)
round(price, -1); round(1234.5678, 2); abs(price * -1); greatest(1, 2.5); coalesce(null, 1); nullif(1, 1)
upper('a'); md5('')
d = 2.5 or d <> d; r = 1.5; r > 1; s = 7 and big > 1; extract(doy from date '2024-12-31')
extract(week from date '2021-01-03')
date_trunc('week', timestamp '2024-01-03 10:00:00'); timestamp '2024-01-31 00:00:00' + interval '1 month'
day - interval '1 year'
t at time zone 'Asia/Kolkata'; left(name, 3) = 'Grü'; substring('hello' from 2); substring('hello' from 10)
substring('hello', 2, 0)
mood = 'sad'; mood in ('sad', 'so so'); at > '09:00'; null::text; null::int; 'text'; 1; 1.50; true; 99999999999
"""


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    with database.connect(options=PINNED) as made:
        for statement in ("create type mood as enum ('sad', 'so so')", TABLE, ROWS):
            made.execute(statement.encode())
        yield made


def _images(connection: Connection, name: str) -> tuple[Readable, list[str]]:
    readable = describe(connection, TableSettings(name=TableId("public", name)), Masking({}, {}, b""))
    query = readable.copy_query(sql.Identifier(name), tail=sql.SQL(" order by id"))
    found: list[Any] = [text for rows in read_images(connection, readable, query) for text in rows["after"].to_pylist()]
    return readable, found


def _in_postgres(connection: Connection, expression: str) -> list[str]:
    connection.execute("drop table if exists result")
    connection.execute(f"create table result as select id, ({expression}) as value from corpus".encode())
    connection.execute("alter table result add primary key (id)")
    return [members(text)["value"] for text in _images(connection, "result")[1]]


def test_an_expression_has_postgres_value_in_the_bytes_of_capture(connection: Connection) -> None:
    readable, images = _images(connection, "corpus")
    columns = columns_of(readable.layout.schema)
    wrong: list[tuple[object, ...]] = []
    for expression in filter(None, (text.strip() for text in EXPRESSIONS.replace("\n", ";").split(";"))):
        program = compile_program({"value": parse(expression, "value")}, None, columns)
        rows = typed(pa.array(images), {name: columns[name] for name in program.columns})
        if not program.columns:
            rows = pa.table({"id": pa.array(range(len(images)))})
        found = program.run_each(rows)
        if found.failed:
            wrong.append((expression, program.types["value"], [], list(found.failed.values())))
            continue
        cells = json_cells(found.rows["value"], program.types["value"]).fill_null("null").to_pylist()
        at_once: Any = program.run_each(rows, as_json=True).rows["value"]
        assert at_once.fill_null("null").to_pylist() == cells
        expected = _in_postgres(connection, expression)
        if program.types["value"].startswith("DECIMAL"):  # of the type's decimals; Postgres may have fewer
            cells, expected = (
                [text and str(Decimal(text).normalize()) for text in some if text != "null"]
                for some in (cells, expected)
            )
        if cells != expected:
            wrong.append((expression, program.types["value"], cells, expected))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    "expression",
    ["1 / (quantity - 3)", "quantity % (quantity - 3)", "d / (quantity - 3)", "name::int", "s * 30000::smallint",
     "quantity * 1000000000", "name::date", "big * big"],
)  # fmt: skip
def test_what_fails_in_postgres_fails_here(connection: Connection, expression: str) -> None:
    readable, images = _images(connection, "corpus")
    columns = columns_of(readable.layout.schema)
    program = compile_program({"value": parse(expression, "value")}, None, columns)
    rows = typed(pa.array(images), {name: columns[name] for name in program.columns})
    failed = set()
    for number in range(1, len(images) + 1):
        try:
            connection.execute(f"select ({expression}) from corpus where id = {number}".encode())
        except psycopg.Error:
            failed.add(number - 1)
    assert failed
    assert set(program.run_each(rows).failed) == failed


@pytest.mark.parametrize("expression", ["quantity + name", "quantity = name", "ok and quantity", "quantity = 'x'",
    "upper(quantity)", "day - name", "not quantity", "u = 'x'", "length(quantity)"])  # fmt: skip
def test_what_postgres_does_not_accept_is_not_accepted(connection: Connection, expression: str) -> None:
    readable, _ = _images(connection, "corpus")
    with pytest.raises(psycopg.Error):
        connection.execute(f"select ({expression}) from corpus limit 0".encode())
    with pytest.raises(ConfigError):
        compile_program({"value": parse(expression, "value")}, None, columns_of(readable.layout.schema))


def test_every_function_is_compared() -> None:
    assert [name for name in FUNCTION_NAMES if f"{name}(" not in EXPRESSIONS] == []

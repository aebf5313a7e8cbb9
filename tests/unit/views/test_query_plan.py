"""What a query may contain: each refusal names the place and what to write instead."""

import random

import pyarrow as pa
import pytest

from cdc.errors import ConfigError, ViewError, ViewWaits
from cdc.model import Column, PgType, TableSchema, TypeKind
from tests.properties.test_views import BANK, query_plan
from tests.scenes.view_histories import FLOAT8, INT8, NUMERIC, TEXT, History, follow, table, table_id, whole_view
from views.catalog import Catalog
from views.plan import ViewPlan
from views.registry import plan_of, settings_kinds

ODD = TableSchema(
    table_id("odd"),
    (
        Column("id", INT8, key=True),
        Column("amount", NUMERIC),
        Column("data", PgType(3802, "jsonb")),
        Column("address", PgType(869, "inet")),
        Column("code", PgType(1042, "bpchar"), 7),
        Column("tags", PgType(1009, "_text", TypeKind.ARRAY, TEXT)),
        Column("at", PgType(1114, "timestamp")),
        Column("until", PgType(1114, "timestamp")),
    ),
)
UNKEYED = TableSchema(table_id("unkeyed"), (Column("x", INT8), Column("y", TEXT)))
CATALOG = Catalog({each.table: each for each in (*BANK, ODD, UNKEYED)}, expected=frozenset([table_id("later")]))


def planned(sql: str, **more: object) -> ViewPlan:
    settings = settings_kinds()["query"].model_validate({"kind": "query", "name": "v", "sql": sql, **more})
    return plan_of(settings, CATALOG)


REFUSED = {
    "select id from": ("this is no SQL statement", "one SELECT"),
    "select": ("there is no FROM", "from public.orders"),
    "delete from accounts": ("a view is one SELECT", "UNION"),
    "select id from accounts union select id from moves": ("a view is one SELECT", "UNION"),
    "select a.id, a.branch_id from accounts a full join branches b on a.branch_id = b.id": (
        "b.id is part of the key and not selected",
        "Select it",
    ),
    "select id from generate_series(1, 3) as id": ("a subquery or a function in FROM", "captured tables"),
    "select id from accounts for update": ("FOR UPDATE is not available", "Leave it out"),
    "select id into x from accounts": ("INTO is not available", "Leave it out"),
    "select id from accounts tablesample bernoulli (10)": ("TABLESAMPLE is not available", "Leave it out"),
    "select id from db.public.accounts": ("the name of a database is not available", "Leave it out"),
    "select a.id from accounts as a (x, id)": ("an alias with names of columns is not available", "Leave it out"),
    "select branch_id, count(*) as n from accounts group by all": ("GROUP BY ALL is not available", "Leave it out"),
    "select branch_id, count(*) as n from accounts group by rollup (branch_id)": ("ROLLUP", "Available"),
    "select name from accounts having name > 'a'": ("name is neither in GROUP BY nor in an aggregate", "max"),
    "select sum(sum(balance)) as s from accounts": ("an aggregate of an aggregate", "Aggregate a column"),
    "select array_agg(distinct name) as s from accounts": ("array_agg.distinct …. is not available", "without"),
    "select max(name order by id) as s from accounts": ("max.… order by …. is not available", "without"),
    "select sum(balance) filter (where nope > 1) as s from accounts": (
        "view v, sql, line 1.*unknown column 'nope'",
        "Co",
    ),
    "select distinct id from accounts": ("DISTINCT is not available", "Leave it out"),
    "select id from accounts order by id": ("ORDER BY is not available", "stores sort"),
    "select id from accounts limit 3": ("LIMIT is not available", "stores sort"),
    "with x as (select 1) select id from accounts": ("a WITH clause is not available", "Leave it out"),
    "select 1 as one": ("there is no FROM", "from public.orders"),
    "select x.id from (select id from accounts) x": ("a subquery or a function in FROM", "Name captured tables"),
    "select id from account": ("did you mean public.accounts", "source.tables"),
    "select x from unkeyed": ("no primary key", "replica identity using index"),
    "select a.id from accounts a join accounts a on a.id = a.id": ("two tables are called a", "as other"),
    "select id from accounts a join moves m on a.id = m.id": ("id is in several tables", "a.id or m.id"),
    "select id, name as id from accounts": ("two columns are called id", "as other"),
    "select id, balance * 2 from accounts": ("has no name", "as total"),
    "select id, nam from accounts": ("unknown column 'nam'", "accounts.name"),
    "select id, now() as t from accounts": ("same value for the same row", "Use a column"),
    "select name from accounts": ("accounts.id is part of the key and not selected", "Select it"),
    "select a.id from accounts a, branches b": ("the join of b has no ON|only JOIN", "join b on"),
    "select a.id from accounts a cross join branches b": ("only JOIN … ON|has no ON", "join b on"),
    "select a.id from accounts a join moves m using (id)": ("only JOIN … ON", "join b on"),
    "select a.id, b.id as bid from accounts a join branches b on a.id > b.id": ("no equality", "equal keys"),
    "select a.id, b.id as bid from accounts a left join branches b on a.branch_id = b.id and a.balance > 1": (
        "an outer join",
        "Move the condition to WHERE",
    ),
    "select a.id, m.id as mid from accounts a join moves m on a.balance = m.account_id": (
        "a.balance is decimal.*m.account_id is bigint",
        "Cast both",
    ),
    "select a.id, m.id as mid from accounts a join accounts m on a.score = m.score": ("different texts", "Cast both"),
    "select a.id, m.id as mid from odd a join odd m on a.amount = m.amount": ("is numeric.*different texts", "numeric"),
    "select a.id, m.id as mid from odd a join odd m on a.code = m.code": ("different texts", "text"),
    "select score, count(*) as n from accounts group by score": ("a group by double", "Cast it"),
    "select amount, count(*) as n from odd group by amount": ("a group by numeric", "numeric"),
    "select data, count(*) as n from odd group by data": ("a group by json", "text"),
    "select branch_id, name from accounts group by branch_id": ("neither in GROUP BY nor in an aggregate", "max"),
    "select count(*) as n from accounts group by branch_id": ("not selected: rows could not", "Select it"),
    "select count(*) as id from accounts": ("the key of its only row is called id", "another name"),
    "select sum(score) as s from accounts": ("depends on the order of the rows", "numeric"),
    "select avg(name) as s from accounts": ("avg of varchar", "Cast it"),
    "select sum(amount) as s from odd": ("sum of numeric", "Cast it"),
    "select min(amount) as s from odd": ("min of numeric, whose values are known as texts", "Cast it"),
    "select max(data) as s from odd": ("max of json", "Cast it"),
    "select min(address) as s from odd": ("min of inet", "Cast it"),
    "select count(distinct amount) as s from odd": ("count of numeric", "Cast it"),
    "select array_agg(tags) as s from odd": ("array_agg of text|array_agg of varchar", "Cast it"),
    "select last_by(id, amount) as s from odd": ("last_by of numeric", "Cast it"),
    "select last_by(until - at, id) as s from odd": ("last_by of interval", "extract"),
    "select max(until - at) as s from odd": ("max of interval", "Cast it"),
    "select bool_or(id) as s from accounts": ("bool_or of bigint", "Compare it first"),
    "select sum(distinct id) as s from accounts": ("distinct …\\) is not available", "without distinct"),
    "select count(distinct (id, name)) as s from accounts": ("count of tuple", "Cast it"),
    "select stddev(id) as s from accounts": ("is not available", "Available: count"),
    "select percentile_cont(2) within group (order by id) as s from accounts": ("between 0 and 1", "0.95"),
    "select percentile_cont(0.5) within group (order by name) as s from accounts": ("percentile_cont of", "disc"),
    "select mode() within group (order by id) as s from accounts": ("this is no percentile", "percentile_cont"),
    "select top_k(id, 0) as s from accounts": ("needs a number of values", "top_k"),
    "select last_by(id) as s from accounts": ("has two arguments", "last_by"),
    "select array_agg(id order by id, name) as s from accounts": ("ordered by one value", "Leave the others"),
    "select id, row_number() over (order by id) as n from accounts": ("a window function", "rows are read"),
}


@pytest.mark.parametrize("sql", REFUSED)
def test_a_refusal_names_the_view_and_the_remedy(sql: str) -> None:
    message, remedy = REFUSED[sql]
    with pytest.raises(ConfigError, match=message) as failed:
        planned(sql)
    assert failed.value.message.startswith("view v")
    assert failed.value.remedy
    assert remedy in failed.value.remedy


def test_a_refusal_names_the_place_in_the_statement() -> None:
    with pytest.raises(ConfigError, match="view v, sql, line 2, column 7"):
        planned("select branch_id,\n  1 + sum(score) as x\nfrom accounts group by 1")


def test_a_table_that_capture_has_not_described_yet_is_waited_for() -> None:
    with pytest.raises(ViewWaits, match=r"public\.later is not in the log yet"):
        planned("select id from later")


def test_a_declared_key_must_be_a_column_of_the_result() -> None:
    with pytest.raises(ConfigError, match="key nam is no column") as failed:
        planned("select name, id from accounts", key=["nam"])
    assert "Its columns: name, id" in failed.value.remedy


def _keys(plan: ViewPlan) -> list[str]:
    return [column.name for column in plan.schema.key]


def test_the_key_is_that_of_the_tables_or_of_the_groups() -> None:
    assert _keys(planned("select name, id from accounts")) == ["id"]
    assert _keys(planned("select a.name, a.id from accounts a join branches b on a.branch_id = b.id")) == ["id"]
    assert _keys(planned("select a.id as x, b.id as y from accounts a join branches b on a.id = b.boss_id")) == [
        "x",
        "y",
    ]
    assert _keys(planned("select count(*) as n, branch_id, name from accounts group by 3, branch_id")) == [
        "branch_id",
        "name",
    ]
    assert _keys(planned("select count(*) as n from accounts")) == ["id"]


@pytest.mark.parametrize("name", ["_id", "_sign", "_key", "_json"])
def test_a_column_with_a_name_of_our_own_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"view v: column {name} of its result") as failed:
        planned(f'select id, name as "{name}" from accounts')
    assert "another name" in failed.value.remedy
    schema = table("odd_names", {"id": INT8}, **{name: TEXT})
    settings = settings_kinds()["documents"].model_validate(
        {"kind": "documents", "name": "v", "root": "public.odd_names"}
    )
    with pytest.raises(ConfigError, match=f"view v: column {name} of public.odd_names"):
        plan_of(settings, Catalog({schema.table: schema}))


def test_columns_may_have_any_other_name() -> None:
    names = ["c0", "g0", "x0", "a0", "Ü 'x", 'q"q', "a.b", "select", "given", "value", "_x"]
    schema = table("odd_names", {"id": INT8}, **dict.fromkeys(names, TEXT))
    done = history(schema)
    for number in range(3):
        write(done, schema, number, dict.fromkeys(names, f'"{number}"'))
    catalog = Catalog({schema.table: schema})
    documents = {"kind": "documents", "name": "v", "root": "public.odd_names"}
    listed = ", ".join('o."' + name.replace('"', '""') + '"' for name in names if "." not in name)
    query = {"kind": "query", "name": "v", "sql": f"select id, {listed} from odd_names o"}
    groups = {
        "kind": "query",
        "name": "v",
        "sql": f"select {listed}, max(id) as g0_ from odd_names o group by {listed}",
    }
    for facts in (documents, query, groups):
        plan = plan_of(settings_kinds()[str(facts["kind"])].model_validate(facts), catalog)
        assert len(follow(plan, done, One()).rows) == 3


def test_columns_have_the_types_of_postgres() -> None:
    sql = "select branch_id, sum(balance) as s, avg(balance) as a, count(*) as n, array_agg(name) as l from accounts"
    types = {each.name: each.type.name for each in planned(f"{sql} group by branch_id").schema.columns}
    assert types == {"branch_id": "int4", "s": "numeric", "a": "float8", "n": "int8", "l": "_text"}


def test_the_definition_changes_with_the_statement_and_with_nothing_else() -> None:
    one, two = planned("select id from accounts"), planned("select id from accounts where id > 1")
    assert one.definition == planned("select id from accounts").definition != two.definition


# -- at work


def history(*schemas: TableSchema) -> History:
    return History(random.Random(1), schemas, lambda _, __: None)


def write(done: History, schema: TableSchema, number: int, row: dict[str, str | None] | None) -> None:
    """One transaction that writes or deletes one row."""
    done.lsn += 10
    key, rows = f'{{"id":{number}}}', done.tables.setdefault(schema.table, {})
    known = key in rows
    if row is None:
        del rows[key]
        done.say(schema, "d", key, None)
    else:
        nothing: dict[str, str | None] = {column.name: None for column in schema.columns}
        rows[key] = {**nothing, "id": str(number), **row}
        done.say(schema, "u" if known else "c", key, rows[key])
    done.at[done.lsn] = {each.table: dict(done.tables.get(each.table, {})) for each in done.schemas}


def content(sql: str, done: History) -> dict[str, str]:
    """After every transaction as a batch of its own, compared each time."""
    return follow(query_plan(sql), done, One()).rows


class One(random.Random):
    """Cuts after every transaction."""

    def randint(self, a: int, b: int) -> int:
        return a


ACCOUNTS = BANK[0]


def test_a_group_that_becomes_empty_is_deleted_and_comes_back() -> None:
    for call in ("sum(balance)", "max(balance)"):
        done = history(*BANK)
        sql = f"select branch_id, {call} as x from accounts group by branch_id"
        write(done, ACCOUNTS, 1, {"branch_id": "7", "balance": "1.50"})
        assert content(sql, done) == {'{"branch_id":7}': '{"branch_id":7,"x":1.50}'}
        write(done, ACCOUNTS, 1, {"branch_id": None, "balance": "1.50"})
        assert content(sql, done) == {'{"branch_id":null}': '{"branch_id":null,"x":1.50}'}
        write(done, ACCOUNTS, 1, None)
        assert content(sql, done) == {}
        write(done, ACCOUNTS, 1, {"branch_id": "7", "balance": None})
        assert content(sql, done) == {'{"branch_id":7}': '{"branch_id":7,"x":null}'}


def test_a_sum_has_every_digit() -> None:
    done = history(*BANK)
    for number in range(50):
        write(done, ACCOUNTS, number, {"balance": "9999999999.99"})
    assert content("select sum(balance) as x from accounts", done) == {'{"id":1}': '{"id":1,"x":499999999999.50}'}


def test_rows_are_counted_without_reading_any_column() -> None:
    done = history(*BANK)
    for number in range(3):
        write(done, ACCOUNTS, number, {})
    assert content("select count(*) as n from accounts", done) == {'{"id":1}': '{"id":1,"n":3}'}


def test_a_null_key_joins_nothing_and_groups_with_null() -> None:
    done = history(*BANK)
    write(done, ACCOUNTS, 1, {"name": None})
    write(done, ACCOUNTS, 2, {"name": None})
    joined = "select a.id, b.id as other from accounts a left join accounts b on a.name = b.name"
    assert sorted(content(joined, done).values()) == ['{"id":1,"other":null}', '{"id":2,"other":null}']
    assert list(content("select name, count(*) as n from accounts group by name", done).values()) == [
        '{"name":null,"n":2}'
    ]


@pytest.mark.parametrize("batches", ["together", "one by one"])
def test_two_rows_with_one_key_stop_the_view_also_if_they_come_in_different_batches(batches: str) -> None:
    done = history(*BANK)
    write(done, ACCOUNTS, 1, {"name": '"x"', "score": "1"})
    write(done, ACCOUNTS, 2, {"name": '"x"', "score": "2"})
    plan = planned("select name, score from accounts", key=["name"])
    graph = plan.graph()
    with pytest.raises(ViewError, match="View v has two rows with the same key") as failed:
        if batches == "together":
            graph.step(pa.concat_tables(rows for _, rows in done.batches(One())))
        for _, rows in done.batches(One()):
            graph.step(rows)
    assert "Name more columns" in failed.value.remedy


def test_a_value_that_an_expression_cannot_compute_stops_the_view() -> None:
    done = history(*BANK)
    write(done, ACCOUNTS, 1, {"branch_id": "0"})
    (rows,) = [rows for _, rows in done.batches(One())]
    with pytest.raises(Exception, match="division by zero"):
        planned("select id, 1 / branch_id as x from accounts").graph().step(rows)


def test_an_empty_source_is_an_empty_view() -> None:
    for sql in ("select id from accounts", "select count(*) as n from accounts"):
        plan = planned(sql)
        assert whole_view(plan, {}) == {}
        assert plan.graph().output.rows.entries == 0


def test_floats_have_the_type_that_capture_gave_them() -> None:
    schema = table("floats", {"id": INT8}, x=FLOAT8)
    done = history(schema)
    sql = "select max(x) as hi, min(x) as lo from floats"
    settings = settings_kinds()["query"].model_validate({"kind": "query", "name": "v", "sql": sql})
    plan = plan_of(settings, Catalog({schema.table: schema}))
    for number, cell in enumerate(["0", "-0", "0"]):
        write(done, schema, number, {"x": cell})
    assert list(follow(plan, done, One()).rows.values()) == ['{"id":1,"hi":0,"lo":-0}']

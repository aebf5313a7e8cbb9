"""A view's content after each batch is what one query over the tables computes, however the log is cut into batches.

Two runs with other cuts, one of them restarted from checkpoints, say the same of a row at the same version.
"""

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cdc.arrays import AnyArray
from cdc.model import Column, ForeignKey
from tests.scenes.view_histories import (
    FLOAT8,
    INT4,
    INT8,
    NUMERIC,
    ODD_TEXTS,
    TEXT,
    assert_agree,
    follow,
    random_history,
    table,
    table_id,
)
from views.catalog import Catalog
from views.dataflow import aggregate, changes, collect, join, output
from views.documents.settings import DocumentSettings
from views.kinds import documents
from views.plan import ViewPlan
from views.registry import plan_of, settings_kinds
from views.state import table as state_table
from views.state.key_hash import Hashes, hashes

SEEDS = st.integers(0, 2**32 - 1)
LENGTH = 14

SHOP = (
    table("orders", {"id": INT8}, customer_id=INT8, status=TEXT),
    table("items", {"id": INT8}, order_id=INT8, name=TEXT),
    table("customers", {"id": INT8}, name=TEXT),
    table("tags", {"id": INT8}, label=TEXT),
    table("order_tags", {"order_id": INT8, "tag_id": INT8}),
    table("parts", {"item_id": INT8, "number": INT4}, what=TEXT),
)
KEYS = (
    ForeignKey(table_id("orders"), ("customer_id",), table_id("customers"), ("id",)),
    ForeignKey(table_id("items"), ("order_id",), table_id("orders"), ("id",)),
    ForeignKey(table_id("order_tags"), ("order_id",), table_id("orders"), ("id",)),
    ForeignKey(table_id("order_tags"), ("tag_id",), table_id("tags"), ("id",)),
    ForeignKey(table_id("parts"), ("item_id",), table_id("items"), ("id",)),
)
ITEMS = {"table": "public.items", "include": [{"table": "public.parts", "name": "parts"}]}
TAGS = {"table": "public.tags", "name": "tags", "through": "public.order_tags"}
DOCUMENTS: Mapping[str, dict[str, Any]] = {
    "one to many": {"root": "public.orders", "include": [{"table": "public.items", "order_by": "name"}]},
    "many to one": {"root": "public.items", "include": [{"table": "public.orders", "name": "order"}]},
    "many to many": {"root": "public.orders", "columns": ["id", "status"], "include": [TAGS]},
    "by columns": {
        "root": "public.customers",
        "include": [{"table": "public.tags", "match": {"label": "name"}, "columns": ["id"]}],
    },
    "itself": {
        "root": "public.items",
        "include": [{"table": "public.items", "name": "x", "match": {"id": "order_id"}}],
    },
    "nested": {
        "root": "public.customers",
        "include": [{"table": "public.orders", "include": [ITEMS, TAGS], "columns": ["id", "status"]}],
    },
}

BANK = (
    table("accounts", {"id": INT8}, branch_id=INT4, balance=NUMERIC, name=TEXT, score=FLOAT8),
    table("branches", {"id": INT4}, city=TEXT, boss_id=INT8),
    table("moves", {"id": INT8}, account_id=INT8, amount=NUMERIC),
)
QUERIES = {
    "filter": "select id, balance from accounts where balance > 30 or name = 'x'",
    "expressions": "select id, -balance as minus, coalesce(name, '?') || '!' as said, score from accounts",
    "inner": "select a.id, b.city, m.id as mid, m.amount * 2 as twice from accounts a join branches b"
    " on a.branch_id = b.id join moves m on m.account_id = a.id where m.amount < a.balance or b.city is null",
    "left": "select a.id, b.id as bid, b.city from accounts a left join branches b on a.branch_id = b.id"
    " and b.city <> 'x' where coalesce(b.city, '') <> 'y'",
    "right": "select b.id, m.id as mid, m.amount, b.city from moves m"
    " right join branches b on m.account_id = b.boss_id",
    "full": "select m.id, a.id as aid, m.amount, a.score from moves m full join accounts a on m.account_id = a.id",
    "full of three": "select a.id, b.id as bid, m.id as mid from accounts a full join branches b on a.branch_id = b.id"
    " full join moves m on m.account_id = b.boss_id",
    "itself": "select x.id, y.id as yid, x.name from accounts x join accounts y"
    " on x.branch_id = y.branch_id and x.id < y.id",
    "by an expression": "select a.id, b.id as bid from accounts a join branches b on a.branch_id + 1 = b.boss_id - 1",
    "by text": "select a.id, b.id as bid, a.score from accounts a join branches b on a.name = b.city",
    "one row": "select sum(balance) as total, count(*) as n, avg(balance) as mean, count(name) as named from accounts",
    "totals": "select branch_id, sum(balance) as total, count(*) filter (where balance > 50) as rich, sum(id) as ids"
    " from accounts group by branch_id having count(*) > 1",
    "by text group": "select name, count(*) as n, avg(balance) as mean from accounts group by name",
    "rows": "select branch_id, min(balance) as lo, max(name) as hi, count(distinct name) as d,"
    " bool_or(balance > 10) as some, bool_and(balance > 10) as every, min(score) as low, max(score) as high"
    " from accounts group by branch_id",
    "percentiles": "select branch_id, percentile_cont(0.5) within group (order by balance) as median,"
    " percentile_disc(0.9) within group (order by id desc) as p10 from accounts group by branch_id",
    "lists": "select branch_id, array_agg(name order by balance desc) as names, top_k(balance, 2) as top,"
    " last_by(name, balance) as newest, first_by(id, name) as first from accounts group by 1 having count(name) > 0",
    "joined groups": "select b.city, count(*) as n, sum(m.amount) as total, max(a.name) as hi from branches b"
    " left join accounts a on a.branch_id = b.id left join moves m on m.account_id = a.id group by b.city",
    "computed": "select id, array[name, 'x'] as pair, balance + 1 as more from accounts where name is not null",
    "distinct": "select name, branch_id from accounts group by name, branch_id",
}


def _shop_value(rng: random.Random, column: Column) -> str | None:
    return rng.choice(["1", "2", "3", "4", None]) if column.type is INT8 else rng.choice(ODD_TEXTS)


def _bank_value(rng: random.Random, column: Column) -> str | None:
    if column.type is NUMERIC:
        return rng.choice([None, f"{rng.randint(-99, 99)}.{rng.randint(10, 99)}", "10.00", "0.00", "9999999999.99"])
    if column.type is FLOAT8:
        return rng.choice([None, "0", "-0", '"NaN"', "1.5", "1e+300", '"-Infinity"'])
    return rng.choice(["1", "2", "3", None]) if column.type is not TEXT else rng.choice(ODD_TEXTS)


def document_plan(name: str) -> ViewPlan:
    facts = {"kind": "documents", "name": "followed", **DOCUMENTS[name]}
    settings = DocumentSettings.model_validate(facts)
    return documents.plan(settings, Catalog({each.table: each for each in SHOP}, KEYS))


def query_plan(sql: str) -> ViewPlan:
    settings = settings_kinds()["query"].model_validate({"kind": "query", "name": "followed", "sql": sql})
    return plan_of(settings, Catalog({each.table: each for each in BANK}))


def _assert_documents(name: str, seed: int, folder: Path, length: int = LENGTH) -> None:
    rng, plan = random.Random(seed), document_plan(name)
    shutil.rmtree(folder, ignore_errors=True)
    history = random_history(rng, [each for each in SHOP if each.table in plan.columns], _shop_value, length)
    assert_agree(follow(plan, history, rng, folder), follow(plan, history, rng))


def _assert_query(name: str, seed: int, folder: Path, length: int = LENGTH) -> None:
    rng, plan = random.Random(seed), query_plan(QUERIES[name])
    shutil.rmtree(folder, ignore_errors=True)
    history = random_history(rng, [each for each in BANK if each.table in plan.columns], _bank_value, length)
    assert_agree(follow(plan, history, rng, folder), follow(plan, history, rng))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints") / "state"


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=8)
@given(seed=SEEDS)
def test_documents_are_those_of_the_source_after_each_batch(name: str, seed: int, folder: Path) -> None:
    _assert_documents(name, seed, folder)


@pytest.mark.parametrize("name", QUERIES)
@settings(max_examples=6)
@given(seed=SEEDS)
@example(seed=1)
def test_the_result_of_a_query_is_that_of_the_source_after_each_batch(name: str, seed: int, folder: Path) -> None:
    _assert_query(name, seed, folder)


@pytest.mark.parametrize("name", ["nested", "full", "totals", "rows", "joined groups"])
def test_keys_with_equal_hashes_are_told_apart(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def colliding(texts: AnyArray, seed: int = 0) -> Hashes:
        return hashes(texts, seed) % np.uint64(3) if seed == 0 else hashes(texts, seed)

    for module in (aggregate, changes, collect, join, output, state_table):
        monkeypatch.setattr(module, "hashes", colliding)
    (_assert_documents if name in DOCUMENTS else _assert_query)(name, 5, folder)


@pytest.mark.soak
@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=300)
@given(seed=SEEDS)
def test_documents_over_long_histories_are_those_of_the_source(name: str, seed: int, folder: Path) -> None:
    _assert_documents(name, seed, folder, 60)


@pytest.mark.soak
@pytest.mark.parametrize("name", QUERIES)
@settings(max_examples=300)
@given(seed=SEEDS)
def test_results_over_long_histories_are_those_of_the_source(name: str, seed: int, folder: Path) -> None:
    _assert_query(name, seed, folder, 60)

"""Documents: what is declared is checked against the tables, and arrays are in order."""

import random
from typing import Any

import pytest

from cdc.errors import ConfigError
from cdc.model import Column, ForeignKey, PgType, TableSchema
from tests.properties.test_views import KEYS, SHOP
from tests.scenes.view_histories import INT8, TEXT, Tables, follow, random_history, table, table_id, whole_view
from views.catalog import Catalog
from views.documents.settings import DocumentSettings
from views.kinds import documents
from views.plan import ViewPlan

CODES = TableSchema(table_id("codes"), (Column("id", PgType(1700, "numeric"), key=True), Column("order_id", INT8)))
UNKEYED = TableSchema(table_id("unkeyed"), (Column("order_id", INT8),))
TWICE = table("twice", {"id": INT8}, sent_by=INT8, paid_by=INT8, price=PgType(1700, "numeric"))
TWO_KEYS = tuple(ForeignKey(table_id("twice"), (name,), table_id("orders"), ("id",)) for name in ("sent_by", "paid_by"))
CATALOG = Catalog({each.table: each for each in (*SHOP, CODES, UNKEYED, TWICE)}, (*KEYS, *TWO_KEYS))


def planned(**facts: Any) -> ViewPlan:
    settings = {"kind": "documents", "name": "v", "root": "public.orders", **facts}
    return documents.plan(DocumentSettings.model_validate(settings), CATALOG)


def include(table: str, **facts: Any) -> dict[str, Any]:
    return {"include": [{"table": f"public.{table}", **facts}]}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown root": (
        {"root": "public.order"},
        "view v: table public.order is not captured; did you mean",
        "correct",
    ),
    "an unknown column": (
        {"columns": ["id", "state"]},
        "public.orders has no column state; did you mean status",
        "status",
    ),
    "a key that is not shown": ({"columns": ["status"]}, "the key column id is not among its columns", "Add it"),
    "a root without a key": ({"root": "public.unkeyed"}, "public.unkeyed has no primary key", "replica identity"),
    "no foreign key": (include("tags"), "include tags: there is no foreign key between public.tags", "match: {"),
    "several foreign keys": (
        include("twice"),
        r"several foreign keys .*\(sent_by\); public.twice \(paid_by\)",
        "Choose",
    ),
    "a member twice": (include("items", name="status"), "include status: public.orders has another member", "Give it"),
    "an unknown order": (include("items", order_by="nam"), "has no column nam; did you mean name", "Its columns"),
    "an unknown match": (include("tags", match={"labl": "status"}), "public.tags has no column labl", "Its columns"),
    "an unknown outer match": (
        include("tags", match={"label": "stat"}),
        "public.orders has no column stat",
        "Its columns",
    ),
    "an unknown link": (
        include("tags", through="public.order_tag"),
        "public.order_tag is not captured",
        "source.tables",
    ),
    "a link without keys": (include("tags", through="public.parts"), "no foreign key between public.parts", "match"),
    "keys of two types": (
        include("tags", match={"label": "id"}),
        "tags.label is varchar, public.orders.id is",
        "one type",
    ),
    "numeric keys": (include("codes", match={"id": "id"}), "public.codes.id is numeric", "one type"),
    "a nested mistake": (
        include("items", include=[{"table": "public.parts", "columns": ["wat"]}]),
        "view v, include items, include parts: public.parts has no column wat; did you mean what",
        "what",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_names_the_view_the_part_and_the_remedy(what: str) -> None:
    facts, message, remedy = REFUSED[what]
    with pytest.raises(ConfigError, match=message) as failed:
        planned(**facts)
    assert failed.value.message.startswith("view v")
    assert remedy in failed.value.remedy


def test_one_of_several_foreign_keys_is_chosen_by_its_columns() -> None:
    plan = planned(**include("twice", match={"paid_by": "id"}))
    assert plan.columns[table_id("twice")] == ("id", "paid_by", "price", "sent_by")


def test_the_columns_are_those_of_the_root_and_a_jsonb_for_each_member() -> None:
    plan = planned(columns=["status", "id"], **include("items"))
    assert [(each.name, each.type.name, each.key) for each in plan.schema.columns] == [
        ("id", "int8", True),
        ("status", "text", False),
        ("items", "jsonb", False),
    ]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["10", "9", "-1", None, "1.5"], ["-1", "1.5", "9", "10", None]),
        (['"b"', '"a b"', '"a"', None, '"B"'], ['"B"', '"a"', '"a b"', '"b"', None]),
        (['"2026-02-01"', '"2025-12-31"', None], ['"2025-12-31"', '"2026-02-01"', None]),
        (["1", "2" + "0" * 29, "1" + "0" * 29], ["1", "1" + "0" * 29, "2" + "0" * 29]),
    ],
)
def test_an_array_is_ordered_by_a_column_numbers_as_numbers_texts_by_bytes_and_null_last(
    cells: list[str | None], expected: list[str | None]
) -> None:
    plan = planned(columns=["id"], **include("items", order_by="name", columns=["name"]))
    items = {
        f'{{"id":{number}}}': {"id": str(number), "order_id": "1", "name": cell} for number, cell in enumerate(cells)
    }
    tables: Tables = {table_id("orders"): {'{"id":1}': {"id": "1"}}, table_id("items"): dict(items)}
    listed = ",".join(f'{{"name":{cell or "null"}}}' for cell in expected)
    assert whole_view(plan, tables) == {'{"id":1}': f'{{"id":1,"items":[{listed}]}}'}


def test_the_steps_order_arrays_as_the_referee_does() -> None:
    values = ["10", "9", "-1", None, "1.5", '"b"', '"a b"', '"a"', '"a!"', "9" * 400, "1e5", '"1"', "true"]
    plan = planned(columns=["id"], **include("items", order_by="name"))
    rng = random.Random(3)
    schemas = [each for each in SHOP if each.table in plan.columns]
    history = random_history(
        rng,
        schemas,
        lambda rng, column: rng.choice(values) if column.type is TEXT else rng.choice(["1", "2", None]),
        40,
    )
    assert follow(plan, history, rng).versions

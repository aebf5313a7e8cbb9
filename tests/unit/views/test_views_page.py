"""Every example of docs/views.md is a view that can be planned and run, and every setting is on the page."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc.model import Column, ForeignKey
from tests.scenes.view_histories import INT4, INT8, MONEY, NUMERIC, TEXT, follow, random_history, table, table_id
from views.catalog import Catalog
from views.documents.settings import DocumentSettings, IncludeSettings
from views.query.aggregates import NAMES
from views.query.settings import QuerySettings
from views.registry import plan_of, settings_kinds

PAGE = (Path(__file__).parents[3] / "docs" / "views.md").read_text(encoding="utf-8")
TABLES = (
    table("customers", {"id": INT8}, name=TEXT, city=TEXT),
    table("orders", {"id": INT8}, customer_id=INT8, status=TEXT, note=TEXT),
    table("items", {"order_id": INT8, "number": INT4}, name=TEXT, price=NUMERIC),
    table("tags", {"id": INT8}, label=TEXT),
    table("order_tags", {"order_id": INT8, "tag_id": INT8}),
)
CATALOG = Catalog(
    {each.table: each for each in TABLES},
    (
        ForeignKey(table_id("orders"), ("customer_id",), table_id("customers"), ("id",)),
        ForeignKey(table_id("items"), ("order_id",), table_id("orders"), ("id",)),
        ForeignKey(table_id("order_tags"), ("order_id",), table_id("orders"), ("id",)),
        ForeignKey(table_id("order_tags"), ("tag_id",), table_id("tags"), ("id",)),
    ),
)


def examples() -> Iterator[dict[str, Any]]:
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        yield from yaml.safe_load(block)["views"]


def _value(rng: random.Random, column: Column) -> str | None:
    if column.modifier == MONEY:
        return f"{rng.randint(0, 200)}.50"
    if column.name == "name":
        return f'"{rng.random()}"'
    return str(rng.randint(1, 5)) if column.type in (INT4, INT8) else rng.choice(['"paid"', '"new"', None])


@pytest.mark.parametrize("facts", list(examples()), ids=lambda facts: str(facts["name"]))
def test_an_example_gives_what_the_source_says(facts: dict[str, Any]) -> None:
    rng = random.Random(7)
    plan = plan_of(settings_kinds()[facts["kind"]].model_validate(facts), CATALOG)
    history = random_history(rng, TABLES, _value, 60)
    assert follow(plan, history, rng).versions


def test_every_setting_and_every_aggregate_is_on_the_page() -> None:
    settings = {name for kind in (DocumentSettings, IncludeSettings, QuerySettings) for name in kind.model_fields}
    assert [name for name in sorted(settings - {"kind"}) if f"| `{name}` |" not in PAGE] == []
    assert [name for name in NAMES if f"`{name}" not in PAGE] == []

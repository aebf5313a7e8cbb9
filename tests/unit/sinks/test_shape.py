"""The shape of a table: its columns and types, and what is refused, with and without a schema."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pydantic import ValidationError

import cdc.log
from cdc.capture.source.doctor import Verdict
from cdc.config.pipeline_file import check
from cdc.config.settings import Settings, SinkSettings, SourceSettings, TableShape
from cdc.errors import ConfigError
from cdc.model import Column, PgType, TableId, TableSchema
from cdc.ports import StagingSink, StoredPieces
from sinks.apply.applier import ParallelTables
from sinks.context import SinkContext
from sinks.delta.settings import DeltaSettings
from sinks.fingerprints import Positioned
from sinks.memory import MemorySettings
from sinks.opensearch.mapping import document_id, document_ids, id_prefix, raw_document_id
from sinks.opensearch.settings import OpenSearchSettings
from sinks.redis.settings import RedisSettings
from sinks.registry import open_sink, settings_kinds
from sinks.rows.images import STORED_ROW_MISSING
from sinks.shape.check import examine
from sinks.shape.columns import shaped_columns
from sinks.shape.images import ShapedImages, shaped_images
from sinks.shape.sink import ShapedSink

INT4, NUMERIC, TEXT = PgType(23, "int4"), PgType(1700, "numeric"), PgType(25, "text")
MONEY = (12 << 16 | 2) + 4
ORDERS = TableId("public", "orders")
SCHEMA = TableSchema(
    ORDERS,
    (
        Column("id", INT4, key=True),
        Column("price", NUMERIC, MONEY),
        Column("quantity", INT4),
        Column("status", TEXT),
        Column("note", TEXT),
    ),
    id=3,
)


def stored(**shape: Any) -> list[tuple[str, str]]:
    columns = shaped_columns(TableShape(**shape), SCHEMA, "lake").columns
    return [(one.column.name, one.column.type.name) for one in columns]


def shaped(images: list[str], unchanged: list[list[str]] | None = None, **shape: Any) -> ShapedImages:
    names = None if unchanged is None else pa.array(unchanged, pa.list_(pa.string()))
    return shaped_images(shaped_columns(TableShape(**shape), SCHEMA, "lake"), pa.array(images), names, b"key")


def test_columns_keep_their_order_and_computed_ones_come_last() -> None:
    assert stored(
        rename={"id": "number"},
        drop=("note",),
        cast={"price": "double precision"},
        mask={"status": "hash"},
        compute={"total": "price * quantity", "copied": "quantity"},
    ) == [
        ("number", "int4"),
        ("price", "float8"),
        ("quantity", "int4"),
        ("status", "text"),
        ("total", "numeric"),
        ("copied", "int4"),
    ]


def test_names_may_change_places() -> None:
    assert stored(rename={"status": "note", "note": "status"})[3:] == [("note", "text"), ("status", "text")]


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ({"drop": ("nte",)}, "shape of public.orders, drop: unknown column 'nte'. Did you mean note"),
        ({"mask": {"email": "mask"}}, "mask: unknown column 'email'. If it was renamed"),
        ({"drop": ("id",)}, "drop: column id is part of the key"),
        ({"cast": {"id": "text"}}, "cast: column id is part of the key"),
        ({"mask": {"id": "hash"}}, "mask: column id is part of the key"),
        ({"rename": {"note": "status"}}, "two columns have the name 'status'"),
        ({"compute": {"status": "upper(status)"}}, "two columns have the name 'status'"),
        ({"compute": {"total": "prise * 2"}}, "compute.total, line 1, column 1: unknown column 'prise'"),
        ({"compute": {"total": "prise"}}, "unknown column 'prise'"),
        ({"compute": {"total": "price / quantity"}}, "compute.total, line 1, column 1: a division of numerics"),
        ({"cast": {"note": "json"}}, "cast.note, line 1, column 1: a cast to json is not available"),
        ({"where": "quantity"}, "where, line 1, column 1: the condition is integer"),
        ({"where": "quantity > 'x'"}, "'x' is no integer"),
    ],
)
def test_what_does_not_fit_the_table_is_refused_with_its_place(shape: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stored(**shape)
    assert part in str(caught.value)


def test_a_table_whose_whole_row_is_the_key_keeps_its_columns() -> None:
    keyless = TableSchema(ORDERS, tuple(Column(one.name, one.type, key=True) for one in SCHEMA.columns), identity="f")
    shaped_columns(TableShape(rename={"id": "number"}, where="quantity > 0"), keyless, "lake")
    with pytest.raises(ConfigError, match="whole row is the key"):
        shaped_columns(TableShape(compute={"twice": "quantity * 2"}), keyless, "lake")


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ({"where": "status ="}, "where, line 1, column 8: this is no SQL expression"),
        ({"compute": {"at": "now()"}}, "compute.at, line 1, column 1: now does not give the same value"),
        ({"cast": {"price": "no type at all"}}, "cast.price"),
        ({"drop": ["note"], "mask": {"note": "hash"}}, "column note is dropped"),
        ({"mask": {"note": "drop"}, "rename": {"note": "text"}}, "column note is dropped"),
        ({"mask": {"price": "hash"}, "cast": {"price": "text"}}, "column price is masked"),
        ({"target": "no name"}, "target"),
        ({"filter": "status = 'paid'"}, "filter"),
    ],
)
def test_a_shape_is_checked_without_a_schema(shape: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TableShape.model_validate(shape)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "part"),
    [
        (MemorySettings, {"shape": {"public.orders": {"mask": {"note": "hash"}}}}, "set mask_key"),
        (MemorySettings, {"tables": ["public.users"], "shape": {"public.orders": {}}}, "add it to its tables"),
        (
            RedisSettings,
            {"shape": {"public.orders": {"target": "all"}, "public.users": {"target": "all"}}},
            "public.orders, public.users have one target",
        ),
        (
            RedisSettings,
            {"keys": {"public.orders": "o:{key}"}, "shape": {"public.orders": {"target": "order"}}},
            "a name in keys and a target",
        ),
        (DeltaSettings, {"path": "lake", "shape": {"public.orders": {"target": "a{b}"}}}, "no name of a folder"),
        (DeltaSettings, {"path": "lake", "shape": {"public.orders": {"target": "a/../b"}}}, "no name of a folder"),
        (OpenSearchSettings, {"shape": {"public.orders": {"target": "Sales"}}}, "no name of an index"),
        (
            OpenSearchSettings,
            {
                "routing": {"public.orders": "note"},
                "shape": {"public.orders": {"target": "all"}, "public.users": {"target": "all"}},
            },
            "remove its routing",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    kind: type[SinkSettings], settings: dict[str, Any], part: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(settings)
    assert part in str(caught.value)


def test_a_shape_names_captured_tables_only() -> None:
    sink = MemorySettings.model_validate({"shape": {"public.oders": {"drop": ["note"]}}})
    with pytest.raises(ValidationError, match=r"public\.oders.*did you mean public\.orders"):
        Settings(source=SourceSettings.model_validate({"tables": ["public.orders"]}), sinks=(sink,))


def test_the_target_is_the_name_in_the_store() -> None:
    shape = {"public.orders": {"target": "order"}, "public.users": {"target": "user:{key}:row"}}
    redis = RedisSettings.model_validate({"shape": shape})
    assert redis.template(ORDERS) == "order:{key}"
    assert redis.template(TableId("public", "users")) == "user:{key}:row"
    assert redis.template(TableId("public", "products")) == "{schema}.{table}:{key}"


def test_a_row_that_does_not_meet_the_filter_needs_no_values() -> None:
    """A filter may exclude what an expression cannot compute."""
    found = shaped(
        ['{"id":1,"quantity":0}', '{"id":2,"quantity":5}', '{"id":3,"quantity":null}'],
        where="quantity <> 0",
        compute={"share": "100 / quantity"},
        drop=("price", "status", "note"),
    )
    assert found.gone.tolist() == [True, False, True]
    assert found.refused == {}
    assert found.after[1].as_py() == '{"id":2,"quantity":5,"share":20}'


def test_a_value_that_fits_no_type_rejects_its_row_if_an_expression_reads_it() -> None:
    images = ['{"id":1,"price":"NaN","quantity":1}', '{"id":2,"price":1.00,"quantity":2}']
    assert shaped(images, compute={"total": "price * 2"}).refused == {
        0: "column price has a value that is no decimal(12,2)"
    }
    assert shaped(images, compute={"twice": "quantity * 2"}).refused == {}
    assert shaped(["no object"], drop=("note",)).refused == {0: "the row image is not a JSON object"}


def test_values_that_pass_keep_every_byte() -> None:
    image = '{"id":1,"price":1.10,"quantity":007,"status":"a\\u00e4\\/","note":{"b" : [1, 2.50]}}'
    found = shaped([image], rename={"note": "doc"})
    assert found.after[0].as_py() == image.replace('"note"', '"doc"')


def test_equal_values_have_equal_hashes_and_null_stays_null() -> None:
    images = ['{"id":1,"note":"x"}', '{"id":2,"note":"x"}', '{"id":3,"note":null}']
    found = shaped(images, mask={"note": "hash", "status": "mask"}, drop=("price", "quantity")).after.to_pylist()
    assert found[0].replace('"id":1', '"id":2') == found[1]
    assert found[2] == '{"id":3,"status":null,"note":null}'
    assert "x" not in found[0][7:].replace("null", "")[30:] and len(found[0]) > 64


def test_what_is_made_of_missing_columns_alone_is_unchanged_and_other_expressions_read_the_row_again() -> None:
    images = ['{"id":1,"price":1.00,"quantity":1,"status":"paid"}', '{"id":2,"status":"draft"}']
    missing = [["note"], ["note"]]
    alone = shaped(images, missing, compute={"size": "length(note)"}, where="status = 'paid'")
    assert alone.unchanged.to_pylist() == [["note", "size"], ["note", "size"]]
    assert (alone.gone.tolist(), alone.refused) == ([False, True], {})
    mixed = shaped(images, missing, compute={"title": "status || note"}, where="status = 'paid'")
    assert (mixed.gone.tolist(), mixed.refused) == ([False, True], {0: STORED_ROW_MISSING})
    filtered = shaped(images, missing, where="note <> ''")
    assert filtered.refused == {0: STORED_ROW_MISSING, 1: STORED_ROW_MISSING}


def test_an_expression_that_fails_without_its_missing_value_does_not_reject_the_row() -> None:
    found = shaped(['{"id":1,"quantity":0}'], [["note"]], compute={"x": "coalesce(note, 'x')::int"})
    assert (found.refused, found.unchanged.to_pylist()) == ({}, [["note", "x"]])


def test_a_change_from_before_a_column_existed_is_read_again() -> None:
    before = TableSchema(ORDERS, SCHEMA.columns[:4], id=2)
    shape = TableShape(compute={"size": "length(note)"})
    columns = shaped_columns(shape, before, "lake", SCHEMA)
    image = '{"id":1,"price":1.00,"quantity":1,"status":"paid"}'
    found = shaped_images(columns, pa.array([image, image[:-1] + ',"note":"abc"}']), None, b"")
    assert found.refused == {0: STORED_ROW_MISSING}
    assert found.after[1].as_py() == image[:-1] + ',"size":3}'


def test_a_shaped_sink_has_the_optional_methods_of_its_sink_and_no_others() -> None:
    context = SinkContext(Path("unused"))
    plain = open_sink(MemorySettings(name="plain"), context)
    memory = open_sink(MemorySettings(name="shaped", shape={ORDERS: TableShape(drop=("note",))}), context)
    lake = open_sink(
        DeltaSettings(path="lake", maintain_minutes=0, shape={ORDERS: TableShape(drop=("note",))}), context
    )
    assert not isinstance(plain, ShapedSink)
    assert isinstance(memory, ShapedSink) and not isinstance(memory, (StagingSink, StoredPieces, Positioned))
    assert isinstance(lake, StagingSink) and isinstance(lake, StoredPieces) and isinstance(lake, ParallelTables)


def test_findings_name_the_sink_the_table_and_types_that_disagree_in_one_index() -> None:
    refunds = TableSchema(TableId("public", "refunds"), (SCHEMA.columns[0], Column("price", INT4)))
    shape = {"public.orders": {"target": "sales"}, "public.refunds": {"target": "sales"}}
    wrong = {"public.orders": {"drop": ["nothing"]}}
    sinks = (OpenSearchSettings.model_validate({"shape": shape}), MemorySettings.model_validate({"shape": wrong}))
    source = SourceSettings.model_validate({"tables": ["public.orders", "public.refunds"]})
    found = examine(Settings(source=source, sinks=sinks), [SCHEMA, refunds])
    assert [(one.verdict, one.object) for one in found] == [
        (Verdict.OK, "opensearch: public.orders"),
        (Verdict.OK, "opensearch: public.refunds"),
        (Verdict.FAIL, "opensearch: public.refunds"),
        (Verdict.FAIL, "memory: public.orders"),
    ]
    assert "column price is int4 here and numeric in public.orders" in found[2].message


SHOP = [
    (
        "orders",
        "id int8! user_id int8 status text total numeric note text placed_at timestamptz updated_at timestamptz",
    ),
    ("order_items", "order_id int8! line int2! product_id int8 quantity int4 price numeric"),
]


def test_the_example_of_the_page_fits_the_shop_of_the_demo() -> None:
    page = Path(__file__).parents[3] / "docs" / "shaping.md"
    example = page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    example = re.sub(r"\$\{[^}]*\}", "key", example)
    settings = check(yaml.safe_load(example), cdc.log.settings_kinds(), settings_kinds(), "the page")
    schemas = []
    for name, text in SHOP:
        words = text.split()
        columns = [
            Column(one, PgType(0, kind.rstrip("!")), MONEY if kind == "numeric" else -1, key=kind.endswith("!"))
            for one, kind in zip(words[::2], words[1::2], strict=True)
        ]
        schemas.append(TableSchema(TableId("public", name), tuple(columns)))
    assert [one.message for one in examine(settings, schemas) if one.verdict is not Verdict.OK] == []


@pytest.mark.parametrize(
    "key", ['{"id":1}', '{"id":"a/b"}', '{"id":""}', f'{{"id":"{"x" * 600}"}}', '{"a":1,"b":null}']
)
def test_ids_of_an_index_of_several_tables_never_collide(key: str) -> None:
    tables = [TableId("public", "a"), TableId("public", "a/b"), TableId("public", "a%2Fb"), TableId("public.a", "b")]
    ids = [document_id(key, id_prefix(table)) for table in tables]
    assert len(set(ids)) == len(tables)
    for table, one in zip(tables, ids, strict=True):
        assert document_ids(pa.array([key]), id_prefix(table)).to_pylist() == [one]
        assert json.loads(raw_document_id(key, id_prefix(table))) == one

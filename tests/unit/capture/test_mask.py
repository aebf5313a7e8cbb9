"""What must not leave the source does not: rules per column, in keys and rows alike."""

import hashlib
import hmac
import json
from typing import Any

import pytest

from cdc.capture.pgoutput.decoder import Decoder
from cdc.capture.rows.mask import Masking, Rule
from cdc.errors import ConfigError
from cdc.model import TableId
from tests.corpus import pgoutput_encoder as pg
from tests.corpus.pgoutput_encoder import UNCHANGED, Relation
from tests.corpus.registry import Registry, enum_of

TABLE = TableId("public", "t")
PEOPLE = Relation(10, "public", "t", (("id", pg.INT8, True), ("name", pg.TEXT, False), ("born", pg.INT8, False)))


def rows(masking: Masking, *messages: bytes) -> tuple[list[dict[str, Any]], Registry]:
    registry = Registry()
    frames = [pg.begin(1), pg.relation(PEOPLE), *messages, pg.commit(1, 2)]
    decoded = Decoder(registry, enum_of, masking=masking).feed([pg.frame(message) for message in frames])
    return decoded.rows.to_pylist(), registry


def masking(**rules: Rule) -> Masking:
    return Masking({TABLE: rules}, secret=b"key")


def digest(value: bytes) -> str:
    return hmac.new(b"key", value, hashlib.sha256).hexdigest()


def test_each_rule_does_what_it_says() -> None:
    (row,), _ = rows(masking(name=Rule.MASK, born=Rule.HASH), pg.insert(10, [b"1", b"Ann", b"1999"]))
    assert json.loads(row["after"]) == {"id": 1, "name": "***", "born": digest(b"1999")}
    (row,), _ = rows(masking(name=Rule.DROP), pg.insert(10, [b"1", b"Ann", b"1999"]))
    assert json.loads(row["after"]) == {"id": 1, "born": 1999}


def test_null_stays_null_and_unsent_stays_unsent() -> None:
    everything = masking(name=Rule.MASK, born=Rule.HASH)
    found, _ = rows(everything, pg.insert(10, [b"1", None, None]), pg.update(10, [b"1", UNCHANGED, UNCHANGED]))
    assert json.loads(found[0]["after"]) == {"id": 1, "name": None, "born": None}
    assert (found[1]["after"], found[1]["unchanged"]) == ('{"id":1}', ["name", "born"])


def test_a_dropped_column_that_was_not_sent_is_not_even_named() -> None:
    (row,), _ = rows(masking(name=Rule.DROP), pg.update(10, [b"1", UNCHANGED, b"5"]))
    assert (row["after"], row["unchanged"]) == ('{"id":1,"born":5}', None)


def test_hashed_keys_are_hashed_in_every_operation() -> None:
    found, _ = rows(
        masking(id=Rule.HASH),
        pg.insert(10, [b"1", None, None]),
        pg.update(10, [b"2", None, None], [b"1", None, None]),
        pg.delete(10, [b"2", None, None]),
    )
    keys = [json.loads(row["key"])["id"] for row in found]
    assert keys == [digest(b"1"), digest(b"1"), digest(b"2"), digest(b"2")]


def test_the_registry_knows_only_the_masked_schema() -> None:
    _, registry = rows(masking(name=Rule.DROP, born=Rule.HASH), pg.insert(10, [b"1", b"x", b"1"]))
    (schema,) = registry.newest()
    assert [(column.name, column.type.name) for column in schema.columns] == [("id", "int8"), ("born", "text")]


def test_listed_columns_are_kept_and_the_key_with_them() -> None:
    (row,), _ = rows(Masking(only={TABLE: frozenset({"born"})}), pg.insert(10, [b"1", b"x", b"7"]))
    assert row["after"] == '{"id":1,"born":7}'


@pytest.mark.parametrize("rule", [Rule.DROP, Rule.MASK])
def test_a_rule_that_would_lose_the_key_is_refused(rule: Rule) -> None:
    with pytest.raises(ConfigError, match=r"id of public[.]t is part of its key"):
        rows(masking(id=rule), pg.insert(10, [b"1", None, None]))


def test_hashing_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="mask_key"):
        Masking({TABLE: {"name": Rule.HASH}})


def test_the_secret_does_not_show() -> None:
    assert "key" not in repr(Masking(secret=b"key").secret.__class__) and "b'key'" not in repr(Masking(secret=b"key"))

"""What the log remembers of keys, and which tables begin again."""

from cdc.capture.source import key_marks, keys
from cdc.capture.source.keys import UniqueIndex
from cdc.config.settings import TableSettings
from cdc.model import TableId

TABLES = [TableSettings(name=TableId("public", name)) for name in ("a", "b", "c")]


def test_only_a_table_with_another_key_begins_again() -> None:
    before = {"public.a": ["id"], "public.b": ["id", "tenant"], "public.gone": ["id"]}
    now = {"public.a": ["id", "tenant"], "public.b": ["id", "tenant"], "public.c": ["id"]}
    assert key_marks.replaced(now, before) == [TableId("public", "a")]


def test_a_table_that_has_no_identity_for_now_is_remembered_by_the_key_it_had() -> None:
    before, now = {"public.a": ["id"], "public.left": ["id"]}, {"public.b": ["x"]}
    assert key_marks.mark(now, before, TABLES) == '{"public.a":["id"],"public.b":["x"]}'


def test_a_key_that_is_not_published_whole_is_no_key() -> None:
    primary = UniqueIndex("pk", ("id", "made"), primary=True, identity=False, immediate=True, not_null=True)
    assert keys.key("f", [primary], ["id", "v"]) == ()
    assert keys.key("f", [primary], ["id", "made", "v"]) == ("id", "made")


def test_neither_a_deferrable_nor_an_unnamed_index_is_an_identity() -> None:
    deferred = UniqueIndex("pk", ("id",), primary=True, identity=False, immediate=False, not_null=True)
    unique = UniqueIndex("u", ("code",), primary=False, identity=False, immediate=True, not_null=True)
    assert keys.key("d", [deferred, unique], ["id", "code"]) == ()
    assert keys.key("f", [deferred, unique], ["id", "code"]) == ("id",)
    assert keys.key("i", [deferred, unique], ["id", "code"]) == ()
    assert keys.identity_columns("n", [unique], ["id", "code"]) == ()

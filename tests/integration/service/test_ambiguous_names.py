"""Names and values that look alike and are not: told apart in the log and in every store."""

import json
import threading

import pytest

import cdc.log
from cdc.config.settings import TableSettings
from cdc.model import Column, PgType, TableId, TableSchema
from cdc.ports import Sink
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.context import SinkContext
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from sinks.opensearch.mapping import document_id, index_name, raw_document_id
from sinks.redis import settings as redis_settings
from sinks.redis import sink as redis
from sinks.redis.keys import Names
from snapshots.verify.comparison import verify_table
from tests.fix_capture import Rig

INT, TEXT = PgType(23, "int4"), PgType(25, "text")
ALIKE = (TableId("a.b", "c"), TableId("a", "b.c"))


def test_two_tables_never_share_an_index_and_ordinary_names_stay_as_they_are() -> None:
    assert len({index_name("p-", table) for table in (*ALIKE, TableId("A.b", "c"), TableId("A", "b.c"))}) == 4
    assert index_name("p-", TableId("public", "orders")) == "p-public.orders"
    assert index_name("p-", TableId("a", "b.c")) == "p-a.b.c"


def test_a_null_is_not_the_text_null_in_a_document_id() -> None:
    keys = ('{"v":null}', '{"v":"null"}', '{"v":"[null]"}')
    assert len({document_id(key) for key in keys}) == 3
    assert [raw_document_id(key).decode() for key in keys] == [json.dumps(document_id(key)) for key in keys]
    assert document_id('{"v":"null"}') == "null", "what is stored under a text stays where it is"


def test_two_tables_never_share_a_name_in_redis_and_ordinary_names_stay_as_they_are() -> None:
    def name(table: TableId, key: str = '{"id":1}') -> str:
        schema = TableSchema(table, (Column("id", INT, key=True), Column("v", TEXT)))
        return Names.of(schema, "p:", "{schema}.{table}:{key}").row(key)

    assert len({name(table) for table in ALIKE}) == 2
    assert name(TableId("public", "orders")) == "p:public.orders:1"
    assert name(TableId("a", "b.c")) == "p:a.b.c:1"
    assert name(TableId("public", "orders"), '{"id":"null"}') == "p:public.orders:null"


@pytest.fixture
def cache(rig: Rig, redis_url: str) -> Sink:
    settings = redis_settings.RedisSettings(name="redis", url=redis_url)
    return redis.open_sink(settings, SinkContext(rig.state))


def test_tables_and_rows_that_look_alike_end_equal_in_a_store(rig: Rig, cache: Sink) -> None:
    rig.database.execute(
        'create schema "a.b"',
        "create schema a",
        'create table "a.b".c (id int primary key, v text)',
        'create table a."b.c" (id int primary key, v text)',
        "create table nulls (x text, y text)",
        "alter table nulls replica identity full",
        "create table single (x text)",
        "alter table single replica identity full",
        "insert into \"a.b\".c values (1, 'of a.b'), (2, 'of a.b')",
        "insert into a.\"b.c\" values (1, 'of a'), (3, 'of a')",
        "insert into nulls values (null, 'null'), ('null', null), (null, null), ('null', 'null')",
        "insert into single values (null), ('null'), ('%6Eull')",
    )
    rig.source["tables"] = ['"a.b".c', 'a."b.c"', "public.nulls", "public.single"]
    rig.begin()
    rig.follow(
        "delete from nulls where x is null and y = 'null'",
        "update single set x = 'changed' where x is null",
        'delete from a."b.c" where id = 1',
    )
    reader = cdc.log.open_reader(rig.settings)
    letters = DeadLetters(rig.state / "letters")
    applier = Applier("redis", open_sink=lambda: cache, log=reader, letters=letters, stop=threading.Event())
    for piece in reader.read(reader.start()):
        applier.apply(gather(ranked(piece.rows), reader.schemas))
    found = {str(table.name): verified(rig, cache, table) for table in rig.settings.source.tables}
    assert found == {'"a.b".c': 2, 'a."b.c"': 1, "public.nulls": 3, "public.single": 3}


def verified(rig: Rig, sink: Sink, table: TableSettings) -> int:
    found = verify_table(rig.settings.source, table, sink)
    assert found.equal, found
    return found.rows


def test_arrays_are_taken_apart_at_their_own_delimiter(rig: Rig) -> None:
    """A type may have any; a domain has that of the type below it."""
    rig.capture_tables(
        "create domain area as box",
        "create type word",
        "create function word_in(cstring) returns word language internal immutable strict as 'textin'",
        "create function word_out(word) returns cstring language internal immutable strict as 'textout'",
        "create type word (input = word_in, output = word_out, like = text, delimiter = '^')",
        "create table items (id int primary key, boxes box[], areas area[], words word[])",
        "insert into items values (1, '{(2,2),(1,1);(4,4),(3,3)}', '{(2,2),(1,1);(4,4),(3,3)}', '{a,b^\"c^d\"^NULL}')",
        snapshot="initial",
    )
    rig.begin()
    rig.follow("insert into items select 2, boxes, areas, words from items")
    for image in rig.folded("public.items").values():
        assert image["boxes"] == image["areas"] == ["(2,2),(1,1)", "(4,4),(3,3)"]
        assert image["words"] == ["a,b", "c^d", None]

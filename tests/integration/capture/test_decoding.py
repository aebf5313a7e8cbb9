"""The decoder on what a real Postgres sends: TOAST, identities, DDL in transactions, streaming, two phases."""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from cdc.capture.pgoutput.decoder import Decoded
from cdc.capture.pgoutput.events import LogicalMessage, RelationChanged, StreamAbort, StreamCommit
from cdc.capture.rows import copy_text
from cdc.capture.rows.layout import images, lay_out
from cdc.capture.rows.mask import Masking, Rule
from cdc.errors import SourceRefused
from cdc.model import TableId
from tests.corpus.changes import PINNED, Connection, Feed
from tests.fix_servers import Database, MakePostgres, fresh_database

NOISE = "(select string_agg(md5(n::text || 'x'), '') from generate_series(1, 400) n)"
"""12 kB that do not compress: stored apart from the row."""


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    with database.connect(options=PINNED) as made:
        yield made


def run(connection: Connection, *statements: str) -> None:
    for statement in statements:
        connection.execute(statement.encode())


def rows(decoded: Decoded) -> list[dict[str, Any]]:
    decoded.rows.validate(full=True)
    return decoded.rows.to_pylist()


def read(feed: Feed, **options: Any) -> list[dict[str, Any]]:
    return rows(feed.decoder(**options).feed(feed.frames()))


def brief(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["op"], row["key"], row["after"]) for row in found]


TOASTED = ("text", "jsonb", "bytea", "text[]")
TOAST_VALUES = {
    "text": NOISE,
    "jsonb": f"to_jsonb({NOISE})",
    "bytea": f"convert_to({NOISE}, 'UTF8')",
    "text[]": f"array[{NOISE}]",
}


@pytest.mark.parametrize("kind", TOASTED)
def test_update_without_the_large_column_names_it(connection: Connection, kind: str) -> None:
    run(connection, f"create table t (id int primary key, big {kind}, small int)")
    run(connection, "alter table t alter big set storage external")
    feed = Feed(connection, ["t"])
    run(connection, f"insert into t values (1, {TOAST_VALUES[kind]}, 1)", "update t set small = 2")
    inserted, updated = read(feed)
    assert len(inserted["after"]) > 10_000
    assert (updated["op"], updated["after"], updated["unchanged"]) == ("u", '{"id":1,"small":2}', ["big"])


@pytest.mark.parametrize("kind", TOASTED)
def test_update_under_full_identity_has_the_large_column(connection: Connection, kind: str) -> None:
    run(
        connection, f"create table t (id int primary key, big {kind}, small int)", "alter table t replica identity full"
    )
    run(connection, "alter table t alter big set storage external")
    feed = Feed(connection, ["t"])
    run(connection, f"insert into t values (1, {TOAST_VALUES[kind]}, 1)", "update t set small = 2")
    inserted, updated = read(feed)
    assert updated["before"] == inserted["after"]
    assert updated["after"] == inserted["after"].replace('"small":1', '"small":2')
    assert (updated["key"], updated["unchanged"]) == ('{"id":1}', None)


def test_large_key_columns_keep_their_key(connection: Connection) -> None:
    run(connection, "create table t (k text primary key, v int)", "alter table t alter k set storage external")
    feed = Feed(connection, ["t"])
    run(connection, "insert into t values (repeat('k', 2500), 1)", "update t set v = 2", "update t set k = 'short'")
    inserted, updated, gone, came = read(feed)
    assert (updated["op"], updated["key"]) == ("u", inserted["key"])
    assert (gone["op"], gone["key"], came["op"], came["key"]) == ("d", inserted["key"], "c", '{"k":"short"}')
    assert gone["version"] == came["version"]


def test_a_column_added_with_a_default_is_there_in_old_rows(connection: Connection) -> None:
    run(connection, "create table t (id int primary key, v int)", "alter table t replica identity full")
    run(connection, "insert into t values (1, 1)")
    feed = Feed(connection, ["t"])
    run(connection, "alter table t add more text default 'given'", "update t set v = 2", "delete from t")
    updated, deleted = read(feed)
    assert updated["before"] == '{"id":1,"v":1,"more":"given"}'
    assert updated["after"] == deleted["before"] == '{"id":1,"v":2,"more":"given"}'


def test_each_row_is_decoded_with_the_relation_of_its_moment(connection: Connection) -> None:
    run(connection, "create table t (id int primary key, v int)")
    feed = Feed(connection, ["t"])
    with connection.transaction():
        run(
            connection,
            "insert into t values (1, 10)",
            "alter table t add w text",
            "insert into t values (2, 20, 'w')",
            "alter table t rename v to renamed",
            "insert into t values (3, 30, 'w')",
            "alter table t drop renamed",
            "insert into t values (4, 'w')",
            "alter table t alter w type int using 5",
            "update t set w = 6 where id = 4",
        )
    found = feed.decoder().feed(feed.frames())
    assert [row["after"] for row in rows(found) if row["op"] == "c"] == [
        '{"id":1,"v":10}', '{"id":2,"v":20,"w":"w"}', '{"id":3,"renamed":30,"w":"w"}', '{"id":4,"w":"w"}',
    ]  # fmt: skip
    assert rows(found)[-1]["after"] == '{"id":4,"w":6}'
    assert len({row["schema_id"] for row in rows(found)}) == 5
    assert len([event for event in found.events if isinstance(event, RelationChanged)]) == 5


def test_keys_swapped_in_a_transaction_end_in_the_swapped_state(connection: Connection) -> None:
    run(connection, "create table t (id int primary key, v text)", "insert into t values (1, 'one'), (2, 'two')")
    feed = Feed(connection, ["t"])
    with connection.transaction():
        run(connection, *(f"update t set id = {a} where id = {b}" for a, b in ((-1, 1), (1, 2), (2, -1))))
    state: dict[str, Any] = {}
    for row in read(feed):
        state[row["key"]] = row["after"]
    assert state == {'{"id":-1}': None, '{"id":1}': '{"id":1,"v":"two"}', '{"id":2}': '{"id":2,"v":"one"}'}


def test_one_key_inserted_deleted_and_inserted_again(connection: Connection) -> None:
    run(connection, "create table t (id int primary key, v int)")
    feed = Feed(connection, ["t"])
    with connection.transaction():
        run(connection, "insert into t values (1, 1)", "delete from t", "insert into t values (1, 2)")
    found = read(feed)
    assert [(row["op"], row["ordinal"]) for row in found] == [("c", 0), ("d", 1), ("c", 2)]
    assert found[0]["version"] < found[1]["version"] < found[2]["version"]


def test_rows_of_one_copy_share_a_version_but_not_an_ordinal(connection: Connection) -> None:
    run(connection, "create table t (id int primary key)")
    feed = Feed(connection, ["t"])
    with connection.cursor().copy("copy t from stdin") as copy:
        for number in range(5):
            copy.write_row((number,))
    found = read(feed)
    assert [row["ordinal"] for row in found] == [0, 1, 2, 3, 4]
    assert [row["key"] for row in found] == [f'{{"id":{number}}}' for number in range(5)]


def test_truncates_of_one_many_and_cascading_tables(connection: Connection) -> None:
    run(connection, "create table a (id int primary key)", "create table b (id int primary key references a)")
    run(connection, "insert into a values (1)")
    feed = Feed(connection, ["a", "b"])
    run(connection, "truncate b restart identity", "truncate a cascade", "insert into a values (2)")
    found = read(feed)
    assert (found[0]["op"], found[0]["table"]) == ("t", "public.b")
    assert sorted((row["op"], row["table"]) for row in found[1:3]) == [("t", "public.a"), ("t", "public.b")]
    assert (found[1]["xid"], found[1]["version"]) == (found[2]["xid"], found[2]["version"])
    assert brief(found[3:]) == [("c", '{"id":2}', '{"id":2}')]


def test_identities_decide_the_key(connection: Connection) -> None:
    names = ("by_default", "by_full", "by_index", "by_nothing")
    for name in names:
        run(connection, f"create table {name} (a int not null, b int, c int)")
    run(connection, "alter table by_default add primary key (a)", "alter table by_full replica identity full")
    run(connection, "create unique index i on by_index (a)", "alter table by_index replica identity using index i")
    run(connection, "alter table by_nothing replica identity nothing")
    feed = Feed(connection, names)
    for name in names:
        run(connection, f"insert into {name} values (1, 2, null)")
    for name in names[:3]:
        run(connection, f"update {name} set b = 3", f"update {name} set a = 2", f"delete from {name}")
    found = read(feed)
    assert {row["table"]: row["key"] for row in found if row["op"] == "c" and row["ordinal"] == 0} == {
        "public.by_default": '{"a":1}',
        "public.by_full": '{"a":1,"b":2,"c":null}',
        "public.by_index": '{"a":1}',
        "public.by_nothing": '{"a":1,"b":2,"c":null}',
    }
    for name in ("by_default", "by_index"):
        mine = [row for row in found if row["table"] == f"public.{name}"]
        assert [row["op"] for row in mine] == ["c", "u", "d", "c", "d"]
        assert [row["before"] for row in mine] == [None] * 5
    full = [row for row in found if row["table"] == "public.by_full"]
    assert [(row["op"], json.loads(row["key"])) for row in full] == [
        ("c", {"a": 1, "b": 2, "c": None}),
        ("d", {"a": 1, "b": 2, "c": None}), ("c", {"a": 1, "b": 3, "c": None}),
        ("d", {"a": 1, "b": 3, "c": None}), ("c", {"a": 2, "b": 3, "c": None}),
        ("d", {"a": 2, "b": 3, "c": None}),
    ]  # fmt: skip


def test_full_identity_with_dropped_columns_and_equal_rows(connection: Connection) -> None:
    run(connection, 'create table t (a int, gone int, b text collate "C")', "alter table t replica identity full")
    run(connection, "alter table t drop gone", "insert into t values (1, 'x'), (1, 'x')")
    feed = Feed(connection, ["t"])
    run(connection, "delete from t where ctid = (select min(ctid) from t)")
    assert brief(read(feed)) == [("d", '{"a":1,"b":"x"}', None)]


def test_an_identity_changed_on_the_way_counts_from_there_on(connection: Connection) -> None:
    run(connection, "create table t (id int primary key, v int)")
    feed = Feed(connection, ["t"])
    target = feed.decoder()
    run(connection, "insert into t values (1, 1)", "update t set v = 2")
    plain = rows(target.feed(feed.frames()))
    run(connection, "alter table t replica identity full", "update t set v = 3", "delete from t")
    full = rows(target.feed(feed.frames()))
    assert [row["before"] for row in plain] == [None, None]
    assert [row["before"] for row in full] == ['{"id":1,"v":2}', '{"id":1,"v":3}']
    assert [row["key"] for row in plain + full] == ['{"id":1}'] * 4


def test_partitions_published_through_their_root_are_one_table(connection: Connection) -> None:
    run(
        connection,
        "create table t (id int, region text, v int, primary key (id, region)) partition by list (region)",
        "create table t_a partition of t for values in ('a')",
        "create table t_b (v int, region text not null, id int not null)",
        "alter table t attach partition t_b for values in ('b')",
    )
    feed = Feed(connection, ["t"])
    run(connection, "alter publication feed set (publish_via_partition_root = true)")
    run(connection, "insert into t values (1, 'a', 10), (2, 'b', 20)", "update t set region = 'b' where id = 1")
    found = read(feed)
    assert {row["table"] for row in found} == {"public.t"}
    assert [(row["op"], row["after"]) for row in found] == [
        ("c", '{"id":1,"region":"a","v":10}'),
        ("c", '{"id":2,"region":"b","v":20}'),
        ("d", None),
        ("c", '{"id":1,"region":"b","v":10}'),
    ]


def test_other_encodings_come_as_utf8_and_broken_bytes_are_an_error(database: Database) -> None:
    for encoding, text, good in (("LATIN1", "chr(252)", True), ("SQL_ASCII", "chr(252)", False)):
        name = f"{database.name}_{encoding.lower()}"
        database.execute(f"create database {name} encoding '{encoding}' locale 'C' template template0")
        other = Database(database.server, name)
        try:
            with other.connect(options=PINNED) as connection:
                run(connection, "create table t (id int primary key, v text)")
                feed = Feed(connection, ["t"])
                run(connection, f"insert into t values (1, {text})")
                if good:
                    assert read(feed)[0]["after"] == '{"id":1,"v":"ü"}'
                else:
                    with pytest.raises(psycopg.errors.CharacterNotInRepertoire):  # the server itself refuses
                        read(feed)
        finally:
            other.drop()


ODD_NAMES = (
    'Quoted " . Name',
    "select",
    "sp ace",
    "ünïcode",
    "n" * 63,
    "MixedCase",
    "mixedcase",
    "back\\slash",
    "; drop",
)


def test_odd_names_of_schemas_tables_and_columns(connection: Connection) -> None:
    def quoted(name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    columns = ", ".join(f"{quoted(name)} int" for name in ODD_NAMES)
    tables = [f"{quoted(name)}.{quoted(name)}" for name in ODD_NAMES]
    for name, table in zip(ODD_NAMES, tables, strict=True):
        run(connection, f"create schema {quoted(name)}", f"create table {table} (id int primary key, {columns})")
    feed = Feed(connection, tables)
    for table in tables:
        run(connection, f"insert into {table} values (1, {', '.join(str(n) for n in range(len(ODD_NAMES)))})")
    found = read(feed)
    assert [TableId.parse(row["table"]) for row in found] == [TableId(name, name) for name in ODD_NAMES]
    expected = {"id": 1, **{name: number for number, name in enumerate(ODD_NAMES)}}
    assert all(json.loads(row["after"]) == expected for row in found)


def test_generated_columns_are_absent_and_tables_without_columns_are_borne(connection: Connection) -> None:
    run(
        connection,
        "create table g (id int generated always as identity primary key, v int,"
        " w int generated always as (v + 1) stored)",
        "create table nothing ()",
    )
    feed = Feed(connection, ["g", "nothing"])
    run(connection, "insert into g (v) values (5)", "insert into nothing default values")
    assert brief(read(feed)) == [("c", '{"id":1}', '{"id":1,"v":5}'), ("c", "{}", "{}")]


def test_an_enum_value_added_later_is_a_string_like_the_others(connection: Connection) -> None:
    run(connection, "create type mood as enum ('sad')", "create table t (id int primary key, m mood, ms mood[])")
    feed = Feed(connection, ["t"])
    run(connection, "insert into t values (1, 'sad', '{sad}')", "alter type mood add value 'glad'")
    run(connection, "insert into t values (2, 'glad', '{glad,NULL}')")
    assert [row["after"] for row in read(feed)] == [
        '{"id":1,"m":"sad","ms":["sad"]}',
        '{"id":2,"m":"glad","ms":["glad",null]}',
    ]


def test_logical_messages_come_with_prefix_and_content(connection: Connection) -> None:
    run(connection, "create table t (id int primary key)")
    feed = Feed(connection, ["t"])
    with connection.transaction(force_rollback=True):
        run(connection, "select pg_logical_emit_message(false, 'loose', 'a')")
        run(connection, "select pg_logical_emit_message(true, 'rolled back', 'b')")
    run(connection, "select pg_logical_emit_message(true, 'kept', 'c')")
    found = feed.decoder().feed(feed.frames()).events
    heard = [(event.prefix, event.content, event.transactional) for event in found if isinstance(event, LogicalMessage)]
    assert heard == [("loose", b"a", False), ("kept", b"c", True)]


def test_transactions_with_an_origin_are_decoded(connection: Connection) -> None:
    run(connection, "create table t (id int primary key)", "select pg_replication_origin_create('elsewhere')")
    feed = Feed(connection, ["t"])
    try:
        run(connection, "select pg_replication_origin_session_setup('elsewhere')", "insert into t values (1)")
        assert brief(read(feed)) == [("c", '{"id":1}', '{"id":1}')]
    finally:
        run(
            connection, "select pg_replication_origin_session_reset()", "select pg_replication_origin_drop('elsewhere')"
        )


class TestStreaming:
    """Protocol 2 and two-phase commit, on a server that streams early."""

    @pytest.fixture
    def connection(self, private_postgres: MakePostgres) -> Iterator[Connection]:
        server = private_postgres({"logical_decoding_work_mem": "64kB", "max_prepared_transactions": "5"})
        with fresh_database(server) as database, database.connect(options=PINNED) as made:
            run(made, "create table t (id int primary key, v text)")
            yield made

    def test_rows_of_aborted_subtransactions_can_be_told_apart(self, connection: Connection) -> None:
        feed = Feed(connection, ["t"], proto_version="2", streaming="on")
        fill = "insert into t select n, repeat('x', 50) from generate_series({}, {}) n"
        with connection.transaction():
            run(connection, fill.format(1, 3000), "savepoint a", fill.format(3001, 6000), "rollback to a")
            run(connection, "savepoint b", fill.format(6001, 9000), "release b", "truncate t", fill.format(1, 2))
        decoded = feed.decoder().feed(feed.frames())
        aborted = {event.subxid for event in decoded.events if isinstance(event, StreamAbort)}
        (commit,) = (event for event in decoded.events if isinstance(event, StreamCommit))
        alive = [row for row, xid in zip(rows(decoded), decoded.subxids.tolist(), strict=True) if xid not in aborted]
        assert aborted and commit.xid not in aborted
        ids = [json.loads(row["key"])["id"] if row["key"] else None for row in alive]
        assert ids == [*range(1, 3001), *range(6001, 9001), None, 1, 2]
        ordinals = decoded.rows["ordinal"].to_pylist()
        assert ordinals == list(range(len(ordinals)))

    def test_streamed_and_plain_decoding_give_the_same_rows(self, connection: Connection) -> None:
        feed = Feed(connection, ["t"], proto_version="2", streaming="on")
        run(connection, "select pg_copy_logical_replication_slot('feed', 'twin')")
        with connection.transaction():
            run(connection, "insert into t select n, repeat('x', 50) from generate_series(1, 5000) n")
            run(connection, "alter table t add w int default 3", "update t set v = 'y' where id < 2000")
        streamed = feed.decoder().feed(feed.frames())
        twin = "select lsn::text, data from pg_logical_slot_get_binary_changes('twin', null, null, variadic %s)"
        plain = feed.decoder().feed(feed.frames(twin, proto_version="1", streaming="off"))
        columns = ["table", "op", "key", "after", "before", "unchanged", "version", "ordinal", "xid"]
        assert streamed.rows.select(columns).equals(plain.rows.select(columns))
        assert any(isinstance(event, StreamCommit) for event in streamed.events)

    def test_a_slot_that_sends_prepared_transactions_before_their_commit_is_refused(
        self, connection: Connection
    ) -> None:
        feed = Feed(connection, ["t"], proto_version="3")
        run(connection, "select pg_drop_replication_slot('feed')")
        run(connection, "select pg_create_logical_replication_slot('feed', 'pgoutput', false, true)")
        run(connection, "begin", "insert into t values (1, 'x')", "prepare transaction 'g1'", "commit prepared 'g1'")
        with pytest.raises(SourceRefused, match="created without two_phase"):
            feed.decoder().feed(feed.frames())


def test_masked_columns_never_show_in_stream_or_snapshot(connection: Connection) -> None:
    run(
        connection,
        "create table t (mail text primary key, name text, card text, phone text, n int)",
        "alter table t replica identity full",
    )
    feed = Feed(connection, ["t"])
    run(
        connection,
        "insert into t values ('secret@mail', 'secret name', 'secret card', 'secret phone', 1)",
        "insert into t values ('b', null, null, null, 2)",
        "update t set mail = 'secret@other' where n = 1",
        "delete from t where n = 2",
    )
    rules = {"mail": Rule.HASH, "name": Rule.MASK, "card": Rule.DROP, "phone": Rule.HASH}
    masking = Masking({TableId("public", "t"): rules}, secret=b"key")
    frames = feed.frames()
    decoded = feed.decoder(masking=masking).feed(frames)
    everything = json.dumps(decoded.rows.to_pylist(), default=str)
    assert "secret" not in everything and "@" not in everything
    found = rows(decoded)
    assert [row["op"] for row in found] == ["c", "c", "d", "c", "d"]
    assert found[0]["key"] == found[2]["key"] != found[3]["key"]
    first = json.loads(found[0]["after"])
    assert first["name"] == "***" and "card" not in first and len(first["phone"]) == 64
    assert json.loads(found[1]["after"])["name"] is None
    events = feed.decoder().feed(frames).events
    plain = next(event.schema for event in events if isinstance(event, RelationChanged))
    with connection.cursor().copy("copy t to stdout") as copy:
        block = copy_text.parse(b"".join(bytes(part) for part in copy), 5)
    key, after = images(lay_out(plain, masking), block)
    assert (key.to_pylist(), after.to_pylist()) == ([found[3]["key"]], [found[3]["after"]])

"""The decoder against messages written by hand."""

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from cdc.capture.pgoutput import decoder as pgoutput
from cdc.capture.pgoutput import events
from cdc.capture.pgoutput.decoder import Decoded, Decoder
from cdc.errors import DecodeError
from cdc.model import LOG_SCHEMA, TableId
from tests.corpus import pgoutput_encoder as pg
from tests.corpus.pgoutput_encoder import UNCHANGED, Relation
from tests.corpus.registry import Registry, enum_of

ORDERS = Relation(10, "public", "orders", (("id", pg.INT8, True), ("note", pg.TEXT, False), ("doc", pg.JSONB, False)))
ORDERS_FULL = Relation(11, "public", "full", tuple((n, t, True) for n, t, _ in ORDERS.columns), "f")
PAIRS = Relation(12, "public", "pairs", (("a", pg.INT8, True), ("v", pg.TEXT, False), ("b", pg.TEXT, True)), "i")


def decoder(**options: Any) -> Decoder:
    return Decoder(Registry(), enum_of, **options)


def transaction(*messages: bytes, at: int = 100, xid: int = 5, ts: int = 1_700_000_000_000_000) -> list[bytes]:
    body = [pg.frame(message, at + number) for number, message in enumerate(messages)]
    return [pg.frame(pg.begin(at + 50, ts, xid)), *body, pg.frame(pg.commit(at + 50, at + 60, ts))]


def rows_of(decoded: Decoded) -> list[dict[str, Any]]:
    assert decoded.rows.schema == LOG_SCHEMA
    decoded.rows.validate(full=True)
    return decoded.rows.to_pylist()


def decoded(*messages: bytes, **options: Any) -> list[dict[str, Any]]:
    return rows_of(decoder(**options).feed(transaction(*messages)))


def test_insert_gives_key_and_row() -> None:
    (row,) = decoded(pg.relation(ORDERS), pg.insert(10, [b"7", b"hi", None]))
    assert (row["table"], row["op"], row["key"]) == ("public.orders", "c", '{"id":7}')
    assert row["after"] == '{"id":7,"note":"hi","doc":null}'
    assert (row["before"], row["unchanged"]) == (None, None)
    assert (row["version"], row["commit_lsn"], row["ordinal"], row["xid"]) == (101, 150, 0, 5)
    assert (row["commit_ts"].timestamp(), row["schema_id"]) == (1_700_000_000, 1)


def test_delete_under_default_identity_has_only_its_key() -> None:
    (row,) = decoded(pg.relation(ORDERS), pg.delete(10, [b"7", None, None]))
    assert (row["op"], row["key"], row["after"], row["before"]) == ("d", '{"id":7}', None, None)


def test_update_leaves_out_the_column_that_was_not_sent_and_names_it() -> None:
    (row,) = decoded(pg.relation(ORDERS), pg.update(10, [b"7", b"x", UNCHANGED]))
    assert (row["op"], row["after"], row["unchanged"]) == ("u", '{"id":7,"note":"x"}', ["doc"])


def test_columns_left_out_at_either_end_leave_no_comma() -> None:
    relation = Relation(9, "s", "t", (("a", pg.TEXT, False), ("b", pg.INT8, True), ("c", pg.TEXT, False)))
    rows = decoded(
        pg.relation(relation),
        pg.update(9, [UNCHANGED, b"1", UNCHANGED]),
        pg.update(9, [b"x", b"1", UNCHANGED]),
        pg.update(9, [UNCHANGED, b"1", b"y"]),
        pg.update(9, [None, b"1", None]),
    )
    assert [row["after"] for row in rows] == [
        '{"b":1}',
        '{"a":"x","b":1}',
        '{"b":1,"c":"y"}',
        '{"a":null,"b":1,"c":null}',
    ]
    assert [row["unchanged"] for row in rows] == [["a", "c"], ["c"], ["a"], None]


def test_full_identity_fills_the_unsent_column_from_the_old_row() -> None:
    old = [b"7", b"x", b'{"big": 1}']
    (row,) = decoded(
        pg.relation(ORDERS_FULL), pg.update(11, [b"7", b"y", UNCHANGED], old, b"O"), keys=lambda oid: ["id"]
    )
    assert (row["op"], row["key"], row["unchanged"]) == ("u", '{"id":7}', None)
    assert row["after"] == '{"id":7,"note":"y","doc":{"big": 1}}'
    assert row["before"] == '{"id":7,"note":"x","doc":{"big": 1}}'


def test_full_identity_without_primary_key_takes_the_whole_row_as_key() -> None:
    deleted, inserted, gone = decoded(
        pg.relation(ORDERS_FULL),
        pg.update(11, [b"7", b"y", UNCHANGED], [b"7", b"x", b"{}"], b"O"),
        pg.delete(11, [b"7", b"y", b"{}"], b"O"),
    )
    assert (deleted["op"], deleted["key"]) == ("d", '{"id":7,"note":"x","doc":{}}')
    assert deleted["before"] == deleted["key"]
    assert (inserted["op"], inserted["key"], inserted["before"]) == ("c", '{"id":7,"note":"y","doc":{}}', None)
    assert (gone["op"], gone["before"]) == ("d", '{"id":7,"note":"y","doc":{}}')


def test_key_change_is_a_delete_and_an_insert_of_one_version() -> None:
    first, second, third = decoded(
        pg.relation(ORDERS), pg.update(10, [b"8", b"x", b"{}"], [b"7", None, None]), pg.insert(10, [b"9", None, None])
    )
    assert [(r["op"], r["key"], r["ordinal"], r["version"]) for r in (first, second, third)] == [
        ("d", '{"id":7}', 0, 101),
        ("c", '{"id":8}', 1, 101),
        ("c", '{"id":9}', 2, 102),
    ]
    assert (first["after"], second["after"]) == (None, '{"id":8,"note":"x","doc":{}}')


def test_an_old_key_that_did_not_change_is_a_plain_update() -> None:
    (row,) = decoded(pg.relation(ORDERS), pg.update(10, [b"7", b"x", None], [b"7", None, None]))
    assert (row["op"], row["key"]) == ("u", '{"id":7}')


def test_a_key_column_that_was_not_sent_is_taken_from_the_old_key() -> None:
    (row,) = decoded(pg.relation(PAIRS), pg.update(12, [b"1", b"v", UNCHANGED], [b"1", None, b"toasted"]))
    assert (row["op"], row["key"], row["unchanged"]) == ("u", '{"a":1,"b":"toasted"}', None)
    assert row["after"] == '{"a":1,"v":"v","b":"toasted"}'


def test_index_identity_gives_the_key_but_no_before() -> None:
    changed_old, changed_new, deleted = decoded(
        pg.relation(PAIRS),
        pg.update(12, [b"2", b"v", b"k"], [b"1", None, b"k"]),
        pg.delete(12, [b"2", None, b"k"]),
    )
    assert (changed_old["key"], changed_new["key"]) == ('{"a":1,"b":"k"}', '{"a":2,"b":"k"}')
    assert (deleted["key"], deleted["before"]) == ('{"a":2,"b":"k"}', None)


def test_swapped_keys_keep_their_order() -> None:
    rows = decoded(
        pg.relation(ORDERS),
        pg.update(10, [b"-1", b"one", None], [b"1", None, None]),
        pg.update(10, [b"1", b"two", None], [b"2", None, None]),
        pg.update(10, [b"2", b"one", None], [b"-1", None, None]),
    )
    assert [(row["op"], json.loads(row["key"])["id"]) for row in rows] == [
        ("d", 1), ("c", -1), ("d", 2), ("c", 1), ("d", -1), ("c", 2),
    ]  # fmt: skip


def test_insert_delete_insert_of_one_key_stay_three_rows_in_order() -> None:
    rows = decoded(
        pg.relation(ORDERS), pg.insert(10, [b"1", b"a", None]), pg.delete(10, [b"1", None, None]),
        pg.insert(10, [b"1", b"b", None]),
    )  # fmt: skip
    assert [(row["op"], row["ordinal"]) for row in rows] == [("c", 0), ("d", 1), ("c", 2)]


def test_truncate_is_one_row_per_table_in_its_place() -> None:
    rows = decoded(
        pg.relation(ORDERS), pg.relation(PAIRS), pg.insert(10, [b"1", None, None]), pg.truncate([12, 10]),
        pg.insert(10, [b"2", None, None]),
    )  # fmt: skip
    assert [(row["op"], row["table"], row["key"], row["ordinal"]) for row in rows] == [
        ("c", "public.orders", '{"id":1}', 0),
        ("t", "public.pairs", None, 1),
        ("t", "public.orders", None, 2),
        ("c", "public.orders", '{"id":2}', 3),
    ]


def test_tables_of_one_feed_stay_in_stream_order() -> None:
    rows = decoded(
        pg.relation(ORDERS), pg.relation(PAIRS), pg.insert(12, [b"1", b"v", b"k"]), pg.insert(10, [b"1", None, None]),
        pg.delete(12, [b"1", None, b"k"]), pg.update(10, [b"1", UNCHANGED, b"1"]),
    )  # fmt: skip
    assert [(row["table"], row["op"], row["ordinal"], row["version"]) for row in rows] == [
        ("public.pairs", "c", 0, 102), ("public.orders", "c", 1, 103),
        ("public.pairs", "d", 2, 104), ("public.orders", "u", 3, 105),
    ]  # fmt: skip
    assert rows[3]["unchanged"] == ["note"]


def test_a_relation_inside_a_transaction_counts_for_the_rows_after_it() -> None:
    changed = Relation(10, "public", "orders", (("id", pg.INT8, True), ("more", pg.BOOL, False)))
    found = decoder().feed(
        transaction(
            pg.relation(ORDERS), pg.insert(10, [b"1", b"a", None]), pg.relation(changed), pg.insert(10, [b"2", b"t"]),
            pg.relation(ORDERS), pg.insert(10, [b"3", b"c", None]),
        )
    )  # fmt: skip
    rows = rows_of(found)
    assert [row["after"] for row in rows] == [
        '{"id":1,"note":"a","doc":null}', '{"id":2,"more":true}', '{"id":3,"note":"c","doc":null}',
    ]  # fmt: skip
    assert [row["schema_id"] for row in rows] == [1, 2, 3]
    changes = [event for event in found.events if isinstance(event, events.RelationChanged)]
    assert [(event.schema.id, event.row) for event in changes] == [(1, 0), (2, 1), (3, 2)]


def test_a_relation_sent_again_unchanged_says_nothing() -> None:
    target = decoder()
    target.feed(transaction(pg.relation(ORDERS), pg.insert(10, [b"1", None, None])))
    again = target.feed(transaction(pg.relation(ORDERS), pg.insert(10, [b"2", None, None])))
    assert not [event for event in again.events if isinstance(event, events.RelationChanged)]


def test_a_transaction_over_feeds_counts_on() -> None:
    frames = transaction(pg.relation(ORDERS), *(pg.insert(10, [b"%d" % n, None, None]) for n in range(4)))
    target = decoder()
    parts = [target.feed([frame]) for frame in frames]
    rows = [row for part in parts for row in rows_of(part)]
    assert [row["ordinal"] for row in rows] == [0, 1, 2, 3]
    assert {row["commit_lsn"] for row in rows} == {150}
    assert rows == rows_of(decoder().feed(frames))


def test_events_say_how_many_rows_came_before_them() -> None:
    frames = [
        *transaction(pg.relation(ORDERS), pg.insert(10, [b"1", None, None])),
        pg.keepalive(9),
        pg.frame(pg.message("hello", b"\0\1", 77)),
        *transaction(pg.insert(10, [b"2", None, None]), pg.insert(10, [b"3", None, None]), at=200, xid=6),
    ]
    found = decoder().feed(frames).events
    assert [(type(event).__name__, event.row) for event in found] == [
        ("Begin", 0), ("RelationChanged", 0), ("Commit", 1), ("LogicalMessage", 1), ("Begin", 1), ("Commit", 3),
    ]  # fmt: skip
    assert found[2] == events.Commit(150, 160, 1_700_000_000_000_000, 1)  # type: ignore[arg-type]
    assert found[3] == events.LogicalMessage("hello", b"\0\1", 77, False, 0, 1)  # type: ignore[arg-type]


def test_origins_and_types_are_passed_over() -> None:
    mood = Relation(10, "public", "orders", (("id", pg.INT8, True), ("mood", 99_999, False)))
    rows = decoded(pg.origin("elsewhere"), pg.type_name(99_999, "public", "mood"), pg.relation(mood),
                   pg.insert(10, [b"1", b'so"so']))  # fmt: skip
    assert rows[0]["after"] == '{"id":1,"mood":"so\\"so"}'


def test_table_without_columns_has_empty_images() -> None:
    (row,) = decoded(pg.relation(Relation(5, "s", "none", ())), pg.insert(5, []))
    assert (row["key"], row["after"]) == ("{}", "{}")


def test_table_with_sixteen_hundred_columns() -> None:
    wide = Relation(5, "s", "wide", tuple((f"c{n}", pg.INT8, n == 0) for n in range(1600)))
    (row,) = decoded(pg.relation(wide), pg.insert(5, [b"%d" % n for n in range(1600)]))
    assert json.loads(row["after"]) == {f"c{n}": n for n in range(1600)}


@pytest.mark.parametrize("name", ['q"uote', "do.t", "back\\slash", "sp ace", "ünï", "N" * 63, "new\nline", "select"])
def test_odd_names_survive(name: str) -> None:
    (row,) = decoded(pg.relation(Relation(5, name, name, ((name, pg.TEXT, True),))), pg.insert(5, [b"x"]))
    assert json.loads(row["after"]) == {name: "x"}
    assert TableId.parse(row["table"]) == TableId(name, name)


def test_tables_whose_names_differ_only_in_case_stay_apart() -> None:
    upper = Relation(6, "public", "ORDERS", ORDERS.columns)
    rows = decoded(
        pg.relation(ORDERS), pg.relation(upper), pg.insert(10, [b"1", None, None]), pg.insert(6, [b"1", None, None])
    )
    assert [row["table"] for row in rows] == ["public.orders", "public.ORDERS"]


def test_large_feeds_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = transaction(pg.relation(ORDERS), *(pg.insert(10, [b"%d" % n, b"x" * n, None]) for n in range(50)))
    whole = decoder().feed(frames)
    monkeypatch.setattr(pgoutput, "PART", 500)
    parts = decoder().feed(frames)
    assert rows_of(parts) == rows_of(whole)
    assert list(parts.events) == list(whole.events)


def test_a_feed_without_messages_is_empty() -> None:
    target = decoder()
    for frames in ([], [pg.keepalive()]):
        found = target.feed(frames)
        assert (found.rows.num_rows, list(found.events), len(found.subxids)) == (0, [], 0)


class TestMalformed:
    """Everything that is not pgoutput is a DecodeError with a place."""

    @pytest.mark.parametrize(
        ("frames", "why"),
        [
            ([b""], "neither"),
            ([b"x" * 40], "neither"),
            ([b"w" * 25], "head"),
            ([pg.frame(b"?")], "unknown"),
            ([pg.frame(pg.insert(10, [b"1"]))], "outside"),
            (transaction(pg.insert(10, [b"1"])), "never described"),
            (transaction(pg.relation(ORDERS), pg.insert(10, [b"1"])), "1 columns where its relation has 3"),
            (transaction(pg.relation(ORDERS), pg.insert(10, [b"1", None, None]) + b"x"), "continues after"),
            (transaction(pg.relation(ORDERS), pg.update(10, [UNCHANGED, None, None])), "Key column id"),
            (transaction(pg.relation(ORDERS), b"I\0\0\0\x0aX"), "mark"),
            (transaction(pg.begin(1)), "out of turn"),
            ([pg.frame(pg.commit(1, 2))], "out of turn"),
            (transaction(pg.relation(ORDERS), pg.insert(10, [b"1", b"\xff\xfe", None])), "UTF-8"),
            (transaction(pg.relation(ORDERS), pg.insert(10, [b"1", None, None]).replace(b"n", b"b")), "not text"),
        ],
    )  # fmt: skip
    def test_is_refused_with_the_reason(self, frames: Sequence[bytes], why: str) -> None:
        with pytest.raises(DecodeError, match=why):
            decoder().feed(frames)

    def test_a_length_beyond_the_message_is_refused_before_anything_is_allocated(self) -> None:
        lie = pg.insert(10, [b"1", b"x", None]).replace(b"t\0\0\0\1x", b"t\xff\xff\xff\xffx")
        with pytest.raises(DecodeError, match="ends inside a tuple"):
            decoder().feed(transaction(pg.relation(ORDERS), lie))
        with pytest.raises(DecodeError):
            decoder().feed(transaction(pg.relation(ORDERS), b"T\xff\xff\xff\xff\0\0\0\0\x0a"))
        with pytest.raises(DecodeError):
            decoder().feed([pg.frame(pg.message("p", b"").replace(b"\0\0\0\0", b"\xff\xff\xff\xff"))])

    @pytest.mark.parametrize(
        "lie",
        [
            pg.relation(ORDERS)[:23] + b"\xff\xff" + pg.relation(ORDERS)[25:],
            b"T\xff\xff\xff\xff\0" + b"\0" * 40,
            b"M\0" + b"\0" * 8 + b"p\0\xff\xff\xff\xff" + b"x" * 40,
            b"I\0\0\0\x0aN\xff\xff" + b"t\xff\xff\xff\xff" * 30,
            b"I\0\0\0\x0aN\0\3t\x7f\xff\xff\xff" + b"x" * 40,
        ],
        ids=["columns", "relations", "content", "width", "value"],
    )
    def test_memory_follows_the_input_and_not_what_it_claims(self, lie: bytes) -> None:
        frames = transaction(pg.relation(ORDERS), lie)
        tracemalloc.start()
        try:
            with pytest.raises(DecodeError):
                decoder().feed(frames)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000

    def test_no_value_is_in_the_message(self) -> None:
        with pytest.raises(DecodeError) as caught:
            decoder().feed(transaction(pg.relation(ORDERS), pg.insert(10, [b"1", b"hidden-marker", None]) + b"x"))
        assert "hidden-marker" not in str(caught.value)
        assert caught.value.offset > 25

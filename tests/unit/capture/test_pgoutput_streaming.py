"""Streamed and prepared transactions, protocol 2 to 4, written by hand."""

from typing import Any

import pytest

from cdc.capture.pgoutput import events
from cdc.capture.pgoutput.decoder import Decoded, Decoder
from cdc.errors import DecodeError
from tests.corpus import pgoutput_encoder as pg
from tests.corpus.pgoutput_encoder import Relation
from tests.corpus.registry import Registry, enum_of

TABLE = Relation(10, "public", "t", (("id", pg.INT8, True),))
WIDER = Relation(10, "public", "t", (("id", pg.INT8, True), ("more", pg.TEXT, False)))


def decoder(**options: Any) -> Decoder:
    return Decoder(Registry(), enum_of, **options)


def frames(*messages: bytes) -> list[bytes]:
    return [pg.frame(message, number) for number, message in enumerate(messages, 1)]


def names(decoded: Decoded) -> list[tuple[str, int]]:
    return [(type(event).__name__, event.row) for event in decoded.events]


def test_streamed_rows_carry_their_subtransaction_and_no_commit_yet() -> None:
    found = decoder().feed(
        frames(
            pg.stream_start(7),
            pg.relation(TABLE, 7),
            pg.insert(10, [b"1"], 7),
            pg.insert(10, [b"2"], 8),
            pg.stream_stop(),
            pg.stream_abort(7, 8),
            pg.stream_commit(7, 90, 99, 1_000),
        )
    )
    assert found.rows["xid"].to_pylist() == [7, 7]
    assert found.subxids.tolist() == [7, 8]
    assert found.rows["commit_lsn"].to_pylist() == [0, 0]
    assert names(found) == [
        ("StreamStart", 0),
        ("RelationChanged", 0),
        ("StreamStop", 2),
        ("StreamAbort", 2),
        ("StreamCommit", 2),
    ]
    assert found.events[-1] == events.StreamCommit(7, 90, 99, 1_000, 2, {-1: 1})  # type: ignore[arg-type]
    assert found.events[-2] == events.StreamAbort(7, 8, row=2)


@pytest.mark.parametrize("cut", range(1, 14))
def test_ordinals_count_on_over_blocks_and_feeds(cut: int) -> None:
    stream = frames(
        pg.stream_start(7),
        pg.relation(TABLE, 7),
        pg.insert(10, [b"1"], 7),
        pg.insert(10, [b"2"], 7),
        pg.stream_stop(),
        pg.begin(50, 0, 6),
        pg.relation(TABLE),
        pg.insert(10, [b"3"]),
        pg.commit(50, 51),
        pg.stream_start(7, first=False),
        pg.insert(10, [b"4"], 7),
        pg.stream_stop(),
        pg.stream_start(7, first=False),
        pg.truncate([10], 7),
        pg.stream_stop(),
        pg.stream_commit(7, 90, 99),
    )
    target = decoder()
    parts = [target.feed(stream[:cut]), target.feed(stream[cut:])]
    rows = [row for part in parts for row in part.rows.to_pylist()]
    assert [(row["xid"], row["ordinal"], row["op"]) for row in rows] == [
        (7, 0, "c"),
        (7, 1, "c"),
        (6, 0, "c"),
        (7, 2, "c"),
        (7, 3, "t"),
    ]


def test_a_relation_of_a_streamed_transaction_is_its_own_until_it_commits() -> None:
    found = decoder().feed(
        frames(
            pg.begin(5), pg.relation(TABLE), pg.insert(10, [b"1"]), pg.commit(5, 6),
            pg.stream_start(7), pg.relation(WIDER, 8), pg.insert(10, [b"2", b"x"], 8), pg.stream_stop(),
            pg.begin(20), pg.insert(10, [b"3"]), pg.commit(20, 21),
            pg.stream_commit(7, 30, 31),
            pg.begin(40), pg.insert(10, [b"4", b"y"]), pg.commit(40, 41),
        )
    )  # fmt: skip
    assert found.rows["after"].to_pylist() == ['{"id":1}', '{"id":2,"more":"x"}', '{"id":3}', '{"id":4,"more":"y"}']


def test_a_relation_of_an_aborted_streamed_transaction_is_forgotten() -> None:
    target = decoder()
    target.feed(
        frames(
            pg.begin(5), pg.relation(TABLE), pg.insert(10, [b"1"]), pg.commit(5, 6),
            pg.stream_start(7), pg.relation(WIDER, 7), pg.stream_stop(), pg.stream_abort(7, 7),
        )
    )  # fmt: skip
    found = target.feed(frames(pg.begin(20), pg.insert(10, [b"3"]), pg.commit(20, 21)))
    assert found.rows["after"].to_pylist() == ['{"id":3}']


def test_a_streamed_transactions_schema_is_recorded_when_it_commits_and_never_when_it_is_rolled_back() -> None:
    registry = Registry()
    target = Decoder(registry, enum_of)
    target.feed(frames(pg.begin(5), pg.relation(TABLE), pg.insert(10, [b"1"]), pg.commit(5, 6)))
    block = [pg.relation(WIDER, 7), pg.insert(10, [b"2", b"x"], 7), pg.stream_stop()]
    target.feed(frames(pg.stream_start(7), *block, pg.stream_abort(7, 7)))
    assert [schema.id for schema in registry.newest()] == [1]
    (provisional,) = target.feed(frames(pg.stream_start(7), *block)).rows["schema_id"].to_pylist()
    assert provisional is not None and provisional < 0
    assert [schema.id for schema in registry.newest()] == [1]
    (committed,) = target.feed(frames(pg.stream_commit(7, 30, 31))).events
    assert isinstance(committed, events.StreamCommit) and committed.schemas == {provisional: 2}
    assert [(schema.id, len(schema.columns)) for schema in registry.newest()] == [(2, 2)]
    later = target.feed(frames(pg.begin(40), pg.insert(10, [b"4", b"y"]), pg.commit(40, 41)))
    assert later.rows["schema_id"].to_pylist() == [2]


def test_a_streamed_schema_that_is_known_keeps_its_id() -> None:
    target = decoder()
    target.feed(
        frames(pg.begin(5), pg.relation(WIDER), pg.commit(5, 6), pg.begin(7), pg.relation(TABLE), pg.commit(7, 8))
    )
    found = target.feed(frames(pg.stream_start(7), pg.relation(TABLE, 7), pg.insert(10, [b"2"], 7), pg.stream_stop()))
    assert found.rows["schema_id"].to_pylist() == [2]


def test_a_message_inside_a_streamed_block_carries_its_transaction() -> None:
    found = decoder().feed(
        frames(
            pg.stream_start(7),
            pg.type_name(77_777, "public", "mood", 7),
            pg.message("p", b"c", 3, True, 7),
            pg.stream_stop(),
            pg.message("p", b"d", 4),
        )
    )
    inside, outside = (event for event in found.events if isinstance(event, events.LogicalMessage))
    assert (inside.xid, inside.content, inside.transactional) == (7, b"c", True)
    assert (outside.xid, outside.content, outside.transactional) == (0, b"d", False)


def test_parallel_aborts_say_where() -> None:
    block = frames(pg.stream_start(7), pg.stream_stop(), pg.parallel_abort(7, 7, 44, 55))
    found = decoder(parallel=True).feed(block)
    assert found.events[-1] == events.StreamAbort(7, 7, 44, 55)  # type: ignore[arg-type]
    with pytest.raises(DecodeError):
        decoder().feed(block)
    with pytest.raises(DecodeError):
        decoder(parallel=True).feed(frames(pg.stream_abort(7, 7)))

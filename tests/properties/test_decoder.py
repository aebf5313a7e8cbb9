"""Whatever the stream holds and however it is cut, the decoder gives it back, or says DecodeError."""

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.capture.pgoutput.decoder import Decoder
from cdc.capture.rows import byte_spans, images
from cdc.errors import DecodeError
from tests.corpus import pgoutput_encoder as pg
from tests.corpus.pgoutput_encoder import UNCHANGED, Relation, Value
from tests.corpus.registry import Registry, enum_of

TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
TYPES = st.sampled_from([pg.INT8, pg.TEXT, pg.BOOL, pg.JSONB, pg.NUMERIC, pg.INT4_ARRAY])


def plain(oid: int) -> st.SearchStrategy[tuple[bytes, Any]]:
    """A value of the type: its Postgres text, and what Python reads from the JSON that it must become."""
    if oid in (pg.INT8, pg.NUMERIC):
        return NUMBERS.map(lambda n: (str(n).encode(), n))
    if oid == pg.BOOL:
        return st.booleans().map(lambda b: (b"t" if b else b"f", b))
    if oid == pg.JSONB:
        return st.dictionaries(TEXTS, NUMBERS, max_size=2).map(lambda d: (json.dumps(d).encode(), d))
    if oid == pg.INT4_ARRAY:
        return st.lists(st.none() | st.integers(-9, 9)).map(
            lambda a: ("{" + ",".join("NULL" if n is None else str(n) for n in a) + "}", a)
        ).map(lambda pair: (pair[0].encode(), pair[1]))  # fmt: skip
    return TEXTS.map(lambda t: (t.encode(), t))


@dataclass
class Story:
    """Messages, and the rows that they must become: (op, table, key, after, before, unchanged, ordinal)."""

    messages: list[bytes] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    ordinal: int = 0

    def add(self, op: str, table: str, *parts: Any) -> None:
        self.rows.append((op, table, *parts, self.ordinal))
        self.ordinal += 1


@st.composite
def relations(draw: st.DrawFn, oid: int) -> Relation:
    names = draw(st.lists(TEXTS.filter(bool), min_size=1, max_size=5, unique=True))
    full = draw(st.booleans())
    keys = [True] * len(names) if full else [True, *(draw(st.booleans()) for _ in names[1:])]
    columns = tuple((name, draw(TYPES), key) for name, key in zip(names, keys, strict=True))
    return Relation(oid, "s", f"t{oid}", columns, "f" if full else "d")


@st.composite
def tuples(draw: st.DrawFn, relation: Relation) -> tuple[list[bytes | None], dict[str, Any]]:
    wire: list[bytes | None] = []
    row: dict[str, Any] = {}
    for name, oid, key in relation.columns:
        null = draw(st.booleans()) and (relation.identity == "f" or not key)
        text, value = (None, None) if null else draw(plain(oid))
        wire.append(text)
        row[name] = value
    return wire, row


def key_of(relation: Relation, row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name, _, key in relation.columns if key}


def only_keys(relation: Relation, wire: Sequence[bytes | None]) -> list[bytes | None]:
    return [value if key else None for value, (_, _, key) in zip(wire, relation.columns, strict=True)]


@st.composite
def one_change(draw: st.DrawFn, story: Story, relation: Relation) -> None:
    full, table = relation.identity == "f", f"s.{relation.name}"
    wire, row = draw(tuples(relation))
    kind = draw(st.sampled_from("iiuudt"))
    if kind == "t":
        story.messages.append(pg.truncate([relation.oid]))
        story.add("t", table, None, None, None, None)
    elif kind == "i":
        story.messages.append(pg.insert(relation.oid, wire))
        story.add("c", table, key_of(relation, row), row, None, None)
    elif kind == "d":
        story.messages.append(
            pg.delete(relation.oid, wire if full else only_keys(relation, wire), b"O" if full else b"K")
        )
        story.add("d", table, key_of(relation, row), None, row if full else None, None)
    else:
        _update(draw, story, relation, wire, row)


def _update(draw: st.DrawFn, story: Story, relation: Relation, wire: list[bytes | None], row: dict[str, Any]) -> None:
    full, table = relation.identity == "f", f"s.{relation.name}"
    old_wire, old = draw(tuples(relation)) if full or draw(st.booleans()) else (None, None)
    sent: list[Value] = list(wire)
    unchanged: list[str] = []
    for at, (name, _, key) in enumerate(relation.columns):
        if old_wire is not None and old is not None and (full or key):
            if draw(st.booleans()) and old_wire[at] is not None:
                sent[at], row[name] = UNCHANGED, old[name]
        elif not key and draw(st.booleans()):
            sent[at] = UNCHANGED
            unchanged.append(name)
            del row[name]
    if old_wire is None or old is None:
        story.messages.append(pg.update(relation.oid, sent))
    else:
        given_old = old_wire if full else only_keys(relation, old_wire)
        story.messages.append(pg.update(relation.oid, sent, given_old, b"O" if full else b"K"))
    before = old if full else None
    if old is not None and (old_key := key_of(relation, old)) != (new_key := key_of(relation, row)):
        story.add("d", table, old_key, None, before, None)
        story.add("c", table, new_key, row, None, unchanged or None)
    else:
        story.add("u", table, key_of(relation, row), row, before, unchanged or None)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    story = Story()
    known = {oid: draw(relations(oid)) for oid in (1, 2)}
    for transaction in range(draw(st.integers(1, 4))):
        story.messages.append(pg.begin(transaction, 0, 9))
        story.ordinal = 0
        if transaction == 0:
            story.messages += [pg.relation(relation) for relation in known.values()]
        for _ in range(draw(st.integers(0, 6))):
            oid = draw(st.sampled_from([1, 2]))
            if draw(st.integers(0, 5)) == 0:
                known[oid] = draw(relations(oid))
                story.messages.append(pg.relation(known[oid]))
            draw(one_change(story, known[oid]))
        story.messages.append(pg.commit(transaction, transaction + 1))
    return story


def loaded(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def flat(rows: pa.Table) -> list[tuple[Any, ...]]:
    rows.validate(full=True)
    return [
        (row["op"], row["table"], loaded(row["key"]), loaded(row["after"]), loaded(row["before"]), row["unchanged"],
         row["ordinal"])
        for row in rows.to_pylist()
    ]  # fmt: skip


def decoder() -> Decoder:
    return Decoder(Registry(), enum_of)


def typed(value: Any) -> Any:
    """true is not 1 in JSON, though it is in Python."""
    return json.dumps(value, sort_keys=True)


@settings(max_examples=150, deadline=None)
@given(
    stories(), st.lists(st.integers(0, 60), max_size=4), st.sampled_from([0, byte_spans.FEW]), st.sampled_from([0, 100])
)
def test_what_was_encoded_comes_back_however_the_stream_is_cut(
    story: Story, cuts: list[int], few: int, piece: int
) -> None:
    """`few` and `piece` are the thresholds between ways of the same result."""
    frames = [pg.frame(message, number) for number, message in enumerate(story.messages)]
    target = decoder()
    edges = [0, *sorted(cuts), len(frames)]
    with patch.object(byte_spans, "FEW", few), patch.object(images, "_PIECE", piece):
        found = [row for a, b in itertools.pairwise(edges) for row in flat(target.feed(frames[a:b]).rows)]
    assert [typed(row) for row in found] == [typed(row) for row in story.rows]


@settings(max_examples=40, deadline=None)
@given(stories(), st.data())
def test_every_strict_prefix_of_a_message_is_refused(story: Story, data: st.DataObject) -> None:
    frames = [pg.frame(message) for message in story.messages]
    broken = data.draw(st.integers(0, len(frames) - 1))
    cut = data.draw(st.integers(0, len(frames[broken]) - 1))
    with pytest.raises(DecodeError) as caught:
        decoder().feed([*frames[:broken], frames[broken][:cut]])
    assert 0 <= caught.value.offset <= len(frames[broken])


RARE = [
    pg.stream_start(7),
    pg.stream_commit(7, 8, 9),
    pg.stream_abort(7, 7),
    pg.message("prefix", b"content"),
    pg.origin("name"),
    pg.type_name(1, "schema", "name"),
    pg.relation(Relation(1, "s", "t", (("a", pg.INT8, True), ("b", pg.TEXT, False)))),
]


@pytest.mark.parametrize("message", RARE, ids=lambda message: chr(message[0]))
def test_every_strict_prefix_of_a_rare_message_is_refused(message: bytes) -> None:
    decoder().feed([pg.frame(message)])
    for size in range(len(message)):
        with pytest.raises(DecodeError):
            decoder().feed([pg.frame(message)[: 25 + size]])
    with pytest.raises(DecodeError):
        decoder().feed([pg.frame(message + b"\0")])


@settings(max_examples=120, deadline=None)
@given(st.lists(st.binary(max_size=80)))
def test_random_frames_are_refused_or_decoded_but_never_crash(frames: list[bytes]) -> None:
    with contextlib.suppress(DecodeError):
        decoder().feed(frames)


@settings(max_examples=120, deadline=None)
@given(stories(), st.data())
def test_damaged_streams_are_refused_or_decoded_but_never_crash(story: Story, data: st.DataObject) -> None:
    frames = [bytearray(pg.frame(message)) for message in story.messages]
    for _ in range(data.draw(st.integers(1, 3))):
        victim = frames[data.draw(st.integers(0, len(frames) - 1))]
        victim[data.draw(st.integers(0, len(victim) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        decoder().feed([bytes(frame) for frame in frames]).rows.validate(full=True)

"""A merged chunk is the state at the high mark, for any interleaving of writers, commits, visibility and marks."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.model import Lsn
from snapshots.backfill.reconcile import Chunk, Committed, Merged, PgSnapshot, Reread, Window

KEYS = 4
Row = dict[str, int]
Change = dict[str, Any]
State = dict[str, Row]
EPOCH = 7 << 32
"""Snapshots count in 64 bits, the stream in 32: the wrap-around must not matter."""


@dataclass
class Tx:
    """A transaction of one writer."""

    xid: int
    changes: list[Change] = field(default_factory=list)
    committed: bool = False


@dataclass
class Source:
    """A Postgres in miniature: row locks, WAL positions, and commits that become visible some time after."""

    next_xid: int
    committed: State
    lsn: int = 100
    visible: State = field(init=False)
    writers: dict[int, Tx] = field(default_factory=dict)
    locks: dict[str, int] = field(default_factory=dict)
    stream: list[Tx] = field(default_factory=list)
    completed: int = -1

    def __post_init__(self) -> None:
        self.visible = dict(self.committed)
        self.completed = self.next_xid - 1

    def act(self, writer: int, what: str, key: str) -> None:
        """One step of one writer; what it may not do is skipped."""
        self.lsn += 10
        tx = self.writers.get(writer)
        if what == "commit":
            if tx and not tx.committed:
                tx.committed = True
                self.stream.append(tx)
                _apply(self.committed, tx.changes)
        elif what == "show":
            if tx and tx.committed:
                _apply(self.visible, tx.changes)
                self.completed = max(self.completed, tx.xid)
                del self.writers[writer]
                self.locks = {held: owner for held, owner in self.locks.items() if owner != writer}
        elif (tx is None or not tx.committed) and self.locks.get(key, writer) == writer:
            self._write(writer, what, key)

    def _write(self, writer: int, what: str, key: str) -> None:
        tx = self.writers.get(writer)
        own = dict(self.committed)
        _apply(own, tx.changes if tx else [])
        row = own.get(key)
        if (what == "insert") != (row is None):
            return
        if tx is None:
            tx = self.writers[writer] = Tx(self.next_xid)
            self.next_xid += 1
        self.locks[key] = writer
        tx.changes.append(self._change(what, key, row))

    def _change(self, what: str, key: str, row: Row | None) -> Change:
        ops = {"insert": "c", "update": "u", "big": "u", "delete": "d"}
        new = {"id": int(key), "v": self.lsn, "big": self.lsn if what in ("insert", "big") else (row or {})["big"]}
        unchanged = ["big"] if what == "update" else None
        return {"op": ops[what], "key": key, "row": new, "unchanged": unchanged, "version": self.lsn}

    def snapshot(self) -> PgSnapshot:
        xmax = self.completed + 1
        running = {tx.xid for tx in self.writers.values() if tx.xid < xmax}
        return PgSnapshot.parse(f"0:{EPOCH + xmax}:{','.join(str(EPOCH + xid) for xid in sorted(running))}")

    def restart_lsn(self) -> int:
        """Below every change of a transaction that is not yet committed."""
        return min((tx.changes[0]["version"] for tx in self.writers.values() if not tx.committed), default=self.lsn) - 1


def _apply(state: State, changes: list[Change]) -> None:
    for change in changes:
        if change["op"] == "d":
            state.pop(change["key"], None)
        else:
            state[change["key"]] = change["row"]


CHANGES = pa.schema(
    [
        ("table", pa.string()),
        ("op", pa.string()),
        ("key", pa.string()),
        ("after", pa.string()),
        ("unchanged", pa.list_(pa.string())),
        ("version", pa.int64()),
        ("schema_id", pa.int32()),
        ("xid", pa.int64()),
    ]
)


def logged(tx: Tx) -> pa.Table:
    rows = []
    for change in tx.changes:
        sent = {name: value for name, value in change["row"].items() if name not in (change["unchanged"] or ())}
        after = None if change["op"] == "d" else json.dumps(sent, separators=(",", ":"))
        rows.append({**change, "after": after, "table": "t", "schema_id": 1, "xid": tx.xid & 0xFFFFFFFF})
    return pa.Table.from_pylist(rows, schema=CHANGES)


def images(state: State) -> pa.Table:
    rows = [{"key": key, "after": json.dumps(row, separators=(",", ":"))} for key, row in sorted(state.items())]
    return pa.Table.from_pylist(rows, schema=pa.schema([("key", pa.string()), ("after", pa.string())]))


class Store:
    """A consumer of the log. With `guarded` it compares versions, as the sinks do; without, the last change wins."""

    def __init__(self, guarded: bool) -> None:
        self._guarded = guarded
        self._held: dict[str, tuple[int, Row | None]] = {}

    def apply(self, rows: list[dict[str, Any]]) -> None:
        for change in rows:
            version, row = self._held.get(change["key"], (-1, None))
            if self._guarded and change["version"] <= version:
                continue
            if change.get("op") == "d":
                self._held[change["key"]] = (change["version"], None)
                continue
            new = json.loads(change["after"])
            if change.get("unchanged"):
                if row is None:
                    continue  # a partial row with nothing to keep from is refused
                new = {**row, **new}
            self._held[change["key"]] = (change["version"], new)

    @property
    def state(self) -> State:
        return {key: row for key, (_, row) in self._held.items() if row is not None}


actions = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["insert", "update", "big", "delete", "commit", "commit", "show", "show"]),
    st.integers(0, KEYS - 1).map(str),
)


@settings(max_examples=500, deadline=None)
@given(
    history=st.lists(actions, min_size=5, max_size=60),
    marks=st.tuples(*[st.integers(0, 60)] * 3),
    stored=st.sets(st.integers(0, KEYS - 1).map(str)),
    first_xid=st.sampled_from([10, 0xFFFFFFFF - 2]),
)
def test_the_log_holds_the_state_at_the_high_mark(
    history: list[tuple[int, str, str]], marks: tuple[int, ...], stored: set[str], first_xid: int
) -> None:
    low, read, high = sorted(min(mark, len(history)) for mark in marks)
    run = Run(Source(first_xid, {key: {"id": int(key), "v": 0, "big": 0} for key in stored}))
    for at, action in enumerate([*history, None]):
        if at == low:
            run.low_mark()
        if at == read:
            run.read()
        if at == high:
            break
        assert action is not None
        run.act(*action)
    merged = run.high_mark()
    if isinstance(merged, Reread):
        assert run.hidden
        return
    for store in run.stores:
        store.apply(merged.rows.to_pylist())
        assert store.state == run.source.committed


@dataclass
class Run:
    """A source, its stream, two consumers of the log, and one chunk on its way."""

    source: Source
    committed: Committed = field(default_factory=lambda: Committed(64))
    stores: tuple[Store, Store] = field(default_factory=lambda: (Store(guarded=True), Store(guarded=False)))
    window: Window | None = None
    chunk: Chunk | None = None
    version: int = 0
    before: set[int] = field(default_factory=set)
    hidden: bool = False
    passed: int = 0

    def act(self, writer: int, what: str, key: str) -> None:
        self.source.act(writer, what, key)
        for tx in self.source.stream[self.passed :]:
            rows = logged(tx)
            self.committed.add(rows["xid"].to_numpy())
            if self.window is not None:
                self.window.add(rows)
            for store in self.stores:
                store.apply(rows.to_pylist())
        self.passed = len(self.source.stream)

    def low_mark(self) -> None:
        self.version = self.source.restart_lsn()
        self.before = {tx.xid for tx in self.source.stream}
        self.window = Window("t", self.committed.recent())

    def read(self) -> None:
        self.chunk = Chunk(images(self.source.visible), self.source.snapshot(), Lsn(self.version), 1)
        self.hidden = any(tx.committed and tx.xid in self.before for tx in self.source.writers.values())

    def high_mark(self) -> Merged | Reread:
        assert self.window is not None
        assert self.chunk is not None
        return self.window.merge(self.chunk)


@given(st.lists(st.lists(st.integers(0, 20), max_size=30), max_size=10))
def test_the_newest_commits_are_remembered(feeds: list[list[int]]) -> None:
    committed = Committed(8)
    order: list[int] = []
    for feed in feeds:
        committed.add(np.array(feed, np.int64))
        order += [xid for at, xid in enumerate(feed) if at == 0 or xid != feed[at - 1]]
    assert set(order[-8:]) == set(committed.recent().tolist())


def test_a_row_that_took_over_a_key_between_the_marks_gets_nothing_of_the_row_before() -> None:
    """Its large column was not sent, and the chunk read the row that is gone: the sinks read it again instead."""
    window = Window("t", np.zeros(0, np.int64))
    gone = {"op": "d", "key": "1", "after": None, "unchanged": None, "version": 5, "schema_id": 1, "table": "t"}
    come = {**gone, "op": "c", "after": '{"id":1,"v":2}', "unchanged": ["big"], "version": 6}
    later = {**come, "op": "u", "after": '{"id":1,"v":3}', "version": 7}
    window.add(pa.Table.from_pylist([gone, come, later], schema=CHANGES))
    read = images({"1": {"id": 1, "v": 1, "big": 8}})
    merged = window.merge(Chunk(read, PgSnapshot.parse("5:5:"), Lsn(1), 1))
    assert isinstance(merged, Merged)
    assert merged.rows.num_rows == 0


def test_a_truncate_between_the_marks_leaves_nothing_of_the_chunk() -> None:
    window = Window("t", np.zeros(0, np.int64))
    truncate = {"op": "t", "key": None, "after": None, "unchanged": None, "version": 5, "schema_id": 1, "table": "t"}
    window.add(pa.Table.from_pylist([truncate], schema=CHANGES))
    chunk = Chunk(images({"1": {"id": 1}}), PgSnapshot.parse("5:5:"), Lsn(1), 1)
    merged = window.merge(chunk)
    assert isinstance(merged, Merged)
    assert merged.rows.num_rows == 0
    assert merged.dropped == 1


def test_a_change_of_columns_between_the_marks_asks_for_another_look() -> None:
    window = Window("t", np.zeros(0, np.int64))
    change = {"op": "c", "key": "1", "after": "{}", "unchanged": None, "version": 5, "schema_id": 2, "table": "t"}
    window.add(pa.Table.from_pylist([change], schema=CHANGES))
    assert isinstance(window.merge(Chunk(images({}), PgSnapshot.parse("5:5:"), Lsn(1), 1)), Reread)

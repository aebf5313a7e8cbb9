"""Whatever the interleaving of transactions and the cuts between feeds: whole, committed, in commit order, once."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.capture.pgoutput.events import Begin, Commit, Event, StreamAbort, StreamCommit, StreamStart, StreamStop
from cdc.capture.transactions.assembly import Assembler, SpilledTransaction
from cdc.model import LOG_SCHEMA, Entry, Lsn

Token = int | Event
"""A row, by its subtransaction, or an event."""


@dataclass
class Disk:
    """Spilled rows, in a list."""

    rows: list[pa.Table] = field(default_factory=list)

    def write(self, rows: pa.Table) -> None:
        self.rows.append(rows)

    def read(self) -> Iterator[pa.Table]:
        yield from self.rows

    def discard(self) -> None:
        self.rows = []


def _table(rows: list[tuple[int, int]]) -> pa.Table:
    """Rows of (subtransaction, identity): the identity is the version."""
    count = len(rows)
    return pa.table(
        {
            "table": ["public.t"] * count,
            "op": ["c"] * count,
            "key": ["{}"] * count,
            "after": ["{}"] * count,
            "before": pa.nulls(count, pa.string()),
            "unchanged": pa.nulls(count, pa.list_(pa.string())),
            "version": [identity for _, identity in rows],
            "commit_lsn": [0] * count,
            "ordinal": [0] * count,
            "xid": [subxid for subxid, _ in rows],
            "commit_ts": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * count, pa.timestamp("us", "UTC")),
            "schema_id": pa.array([1] * count, pa.int32()),
        },
        schema=LOG_SCHEMA,
    )


@dataclass
class History:
    """What a server could send, and what must come out: (end, identities of the rows) per transaction."""

    tokens: list[Token] = field(default_factory=list)
    wanted: list[tuple[int, list[int]]] = field(default_factory=list)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Plain transactions between blocks of streamed ones, some of whose subtransactions abort."""
    history = History()
    rows: dict[int, list[tuple[int, int]]] = {}
    identity, lsn, next_xid = 0, 100, 1000
    for _ in range(draw(st.integers(1, 12))):
        action = draw(st.sampled_from(["plain", "block", "block", "end", "abort"]))
        lsn += 10
        if action == "plain":
            count = draw(st.integers(0, 4))
            history.tokens += [Begin(Lsn(lsn), 5, next_xid), *[next_xid] * count, Commit(Lsn(lsn), Lsn(lsn + 5), 5)]
            history.wanted.append((lsn + 5, list(range(identity, identity + count))))
            identity += count
            next_xid += 10
        elif action == "block":
            xid = draw(st.sampled_from([*rows, next_xid]))
            next_xid += 10 * (xid == next_xid)
            subs = draw(st.lists(st.sampled_from([xid, xid + 1, xid + 2]), max_size=5))
            history.tokens += [StreamStart(xid, xid not in rows), *subs, StreamStop()]
            rows.setdefault(xid, []).extend((sub, identity + place) for place, sub in enumerate(subs))
            identity += len(subs)
        elif rows and action == "abort":
            xid = draw(st.sampled_from([*rows]))
            sub = draw(st.sampled_from([xid, xid + 1, xid + 2]))
            history.tokens.append(StreamAbort(xid, sub))
            if sub == xid:
                del rows[xid]
            else:
                # An aborted subtransaction never says anything again: leave its number to nobody.
                rows[xid] = [(0 if own == sub else own, row) for own, row in rows[xid]]
                rows[xid] = [(own, row) for own, row in rows[xid] if own]
                history.tokens.append(StreamCommit(xid, Lsn(lsn), Lsn(lsn + 5), 5))
                history.wanted.append((lsn + 5, [row for _, row in rows.pop(xid)]))
        elif rows and action == "end":
            xid = draw(st.sampled_from([*rows]))
            history.tokens.append(StreamCommit(xid, Lsn(lsn), Lsn(lsn + 5), 5))
            history.wanted.append((lsn + 5, [row for _, row in rows.pop(xid)]))
    return history


def _feeds(tokens: list[Token], cuts: set[int]) -> Iterator[tuple[pa.Table, list[Event]]]:
    rows: list[tuple[int, int]] = []
    events: list[Event] = []
    identity = 0
    for place, token in enumerate(tokens):
        if isinstance(token, int):
            rows.append((token, identity))
            identity += 1
        else:
            events.append(token._replace(row=len(rows)))
        if place in cuts:
            yield _table(rows), events
            rows, events = [], []
    yield _table(rows), events


@settings(max_examples=300, deadline=None)
@given(histories(), st.sets(st.integers(0, 80)), st.sampled_from([0, 200, 1 << 30]), st.integers(0, 250))
def test_assembly_gives_whole_committed_transactions_in_order(
    history: History, cuts: set[int], budget: int, after: int
) -> None:
    assembler = Assembler(Lsn(after), budget, Disk)
    found: list[tuple[int, list[int]]] = []
    for rows, events in _feeds(history.tokens, cuts):
        subxids = np.asarray(rows["xid"].to_numpy(), np.int64)
        for item in assembler.take(rows, events, subxids):
            assert isinstance(item, (Entry, SpilledTransaction))
            parts = [item.rows] if isinstance(item, Entry) else list(item.parts())
            versions = [int(row) for part in parts for row in part["version"].to_numpy()]
            found.append((item.end, versions))
    wanted = [(end, rows) for end, rows in history.wanted if end > after]
    assert [row for _, rows in found for row in rows] == [row for _, rows in wanted for row in rows]
    assert [end for end, _ in found] == sorted(end for end, _ in found)
    if wanted:
        assert found[-1][0] == wanted[-1][0]


@given(histories(), st.sets(st.integers(0, 80)))
def test_rows_of_streamed_transactions_are_stamped_at_their_commit(history: History, cuts: set[int]) -> None:
    assembler = Assembler(Lsn(0), 1 << 30, Disk)
    commits = {token.end_lsn: token for token in history.tokens if isinstance(token, StreamCommit)}
    for rows, events in _feeds(history.tokens, cuts):
        for item in assembler.take(rows, events, np.asarray(rows["xid"].to_numpy(), np.int64)):
            if isinstance(item, Entry) and (commit := commits.get(item.end)) is not None and item.rows.num_rows:
                assert set(item.rows["commit_lsn"].to_pylist()) == {commit.commit_lsn}
                assert set(item.rows["xid"].to_pylist()) == {commit.xid}
                assert item.rows["ordinal"].to_pylist() == list(range(item.rows.num_rows))

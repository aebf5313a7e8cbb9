"""Whatever Postgres lets its sessions do at once, a store ends as the source: wherever feeds and batches are cut, and
wherever capture begins again. The model of the server is tests/scenes/concurrent_server.py."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

from cdc.capture.pgoutput.decoder import Decoder
from cdc.capture.transactions.assembly import Assembler, SpilledTransaction
from cdc.errors import Rejected
from cdc.model import LOG_SCHEMA, Entry, Lsn
from cdc.ports import Batch
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from sinks.fold.spark import FOLDED
from sinks.memory import MemorySink, Store
from tests.corpus import pgoutput_encoder as pg
from tests.corpus.registry import Registry, enum_of
from tests.properties.test_assembly import Disk
from tests.scenes.concurrent_server import Change, Server, Transaction, Values

ITEMS = pg.Relation(
    7,
    "public",
    "items",
    (("id", pg.INT8, True), ("code", pg.INT8, False), ("label", pg.INT8, False), ("big", 25, False)),
)
START = Lsn(900)
"""Where the log ends before the first transaction."""
seeds = st.integers(0, 2**32)


# -- the stream of a history


def _row(values: Values, big: bool = True) -> list[pg.Value]:
    sent = [b"%d" % value for value in (values.id, values.code, values.label)]
    return [*sent, b"big %d" % values.big if big else pg.UNCHANGED]


def _key(values: Values) -> list[pg.Value]:
    return [b"%d" % values.id, None, None, None]


def _message(change: Change, xid: int | None) -> bytes:
    old, new = change.old, change.new
    if change.op == "t":
        return pg.truncate([7], xid)
    if new is None:
        assert old is not None
        return pg.delete(7, _key(old), xid=xid)
    if old is None:
        return pg.insert(7, _row(new), xid)
    moved = change.op == "m"
    return pg.update(7, _row(new, moved or old.big != new.big), _key(old) if moved else None, xid=xid)


def _plain(whole: Transaction, xid: int) -> list[bytes]:
    changes = [pg.frame(_message(change, None), change.lsn) for change in whole.changes]
    begin = pg.frame(pg.begin(whole.commit_lsn, xid=xid), whole.commit_lsn)
    end = pg.frame(pg.commit(whole.commit_lsn, whole.end_lsn), whole.end_lsn)
    return [begin, pg.frame(pg.relation(ITEMS)), *changes, end]


def _block(xid: int, changes: list[Change], first: bool) -> list[bytes]:
    inside = [pg.frame(_message(change, xid), change.lsn) for change in changes]
    start = [pg.frame(pg.stream_start(xid, first)), pg.frame(pg.relation(ITEMS, xid))]
    return [*start, *inside, pg.frame(pg.stream_stop())]


def _streamed(whole: Transaction, xid: int, rng: random.Random) -> Iterator[tuple[int, list[bytes]]]:
    """Its blocks, each behind its last change, and its commit: where in the WAL, and what is sent there."""
    changes, first = list(whole.changes), True
    while changes:
        size = rng.randint(1, len(changes))
        yield changes[size - 1].lsn, _block(xid, changes[:size], first)
        changes, first = changes[size:], False
    commit = pg.stream_commit(xid, whole.commit_lsn, whole.end_lsn)
    yield whole.commit_lsn, [pg.frame(commit, whole.end_lsn)]


def _stream(history: list[Transaction], after: int, rng: random.Random) -> list[bytes]:
    """What the server sends to a reader whose log ends there: some transactions while they are open."""
    sent: list[tuple[int, list[bytes]]] = []
    for xid, whole in enumerate(history, 100):
        if whole.commit_lsn < after:
            continue
        if rng.random() < 0.4:
            sent += _streamed(whole, xid, rng)
        else:
            sent.append((whole.commit_lsn, _plain(whole, xid)))
    return [frame for _, frames in sorted(sent, key=lambda item: item[0]) for frame in frames]


def _captured(history: list[Transaction], rng: random.Random, after: Lsn = START) -> Iterator[pa.Table]:
    """The entries of the log, by readers that end somewhere and begin again at the log's end."""
    while True:
        frames = _stream(history, after, rng)
        stays = rng.randint(0, len(frames)) if rng.random() < 0.5 else len(frames)
        for item in _read(frames[:stays], after, rng):
            rows = pa.concat_tables(item.parts()) if isinstance(item, SpilledTransaction) else item.rows
            yield rows
            after = item.end
        if stays == len(frames):
            return


def _read(frames: list[bytes], after: Lsn, rng: random.Random) -> Iterator[Entry | SpilledTransaction]:
    decoder = Decoder(Registry(), enum_of, after=after)
    assembler = Assembler(after, rng.choice([0, 1 << 30]), Disk)
    at = 0
    while at < len(frames):
        size = rng.randint(1, 12)
        decoded = decoder.feed(frames[at : at + size])
        for item in assembler.take(decoded.rows, decoded.events, decoded.subxids):
            assert isinstance(item, (Entry, SpilledTransaction))
            yield item
        at += size


# -- what a store makes of it


def _batches(entries: list[pa.Table], rng: random.Random) -> Iterator[pa.Table]:
    """Some entries at a time, and some that were there before."""
    at = 0
    while at < len(entries):
        size = rng.randint(1, 6)
        yield pa.concat_tables(entries[at : at + size])
        if rng.random() < 0.2:
            again = rng.randint(0, at)
            yield pa.concat_tables(entries[again : again + size])
        at += size


def _apply(store: Store, rows: pa.Table, source: dict[str, str] | None = None) -> None:
    """A row that lacks what the store should have is read again from the source, where there is one to read."""
    sink = MemorySink("store", store)
    for batch in gather(ranked(rows), _columns()).batches:
        try:
            sink.apply(batch)
        except Rejected as rejected:
            if source is None:
                raise
            keys = {item.key for item in rejected.items} & source.keys()
            again = [row for row in batch.rows.to_pylist() if row["key"] in keys]
            whole = [{**row, "after": source[row["key"]], "unchanged": []} for row in again]
            sink.apply(Batch(batch.schema, pa.Table.from_pylist(whole, schema=FOLDED)))


@cache
def _columns() -> Registry:
    """One table with one schema."""
    found = Registry()
    Decoder(found, enum_of).feed([pg.frame(pg.begin(1)), pg.frame(pg.relation(ITEMS))])
    return found


def _held(store: Store) -> dict[str, str]:
    """Key to image."""
    return {key: row.image for stored in store.values() for key, row in stored.rows.items() if row.image is not None}


def _shown(state: dict[int, Values]) -> dict[str, str]:
    image = '{{"id":{0.id},"code":{0.code},"label":{0.label},"big":"big {0.big}"}}'
    return {f'{{"id":{key}}}': image.format(values) for key, values in state.items()}


def _replayed(history: list[Transaction]) -> dict[int, Values]:
    """The table after these transactions, one after the other."""
    state: dict[int, Values] = {}
    for change in (change for whole in history for change in whole.changes):
        if change.op == "t":
            state = {}
        if change.old is not None and change.op in "dm":
            del state[change.old.id]
        if change.new is not None:
            state[change.new.id] = change.new
    return state


@given(seeds)
def test_a_store_ends_as_the_source_whatever_sessions_do_at_once(seed: int) -> None:
    server, rng = Server(seed), random.Random(seed)
    assert _replayed(server.committed) == server.state(), "the model is wrong"
    store: Store = {}
    for rows in _batches(list(_captured(server.committed, rng)), rng):
        _apply(store, rows)
    assert _held(store) == _shown(server.state())


@given(seeds)
def test_after_every_entry_a_store_holds_what_was_committed_up_to_there(seed: int) -> None:
    server, store = Server(seed), Store()
    for rows in _captured(server.committed, random.Random(seed)):
        _apply(store, rows)
        reached = rows["commit_lsn"].to_numpy().max(initial=0)
        done = [whole for whole in server.committed if whole.commit_lsn <= reached]
        assert _held(store) == _shown(_replayed(done))


@given(seeds)
def test_versions_follow_commit_order_and_are_above_every_lsn_of_the_transactions_before(seed: int) -> None:
    """So what a store has by the old rule, whose versions were the own LSNs, never stands in the way."""
    history = Server(seed).committed
    greatest = 0
    for rows in _captured(history, random.Random(seed)):
        for whole in (whole for whole in history if whole.commit_lsn in rows["commit_lsn"].to_pylist()):
            own: list[int] = rows.filter(pc.field("commit_lsn") == whole.commit_lsn)["version"].to_numpy().tolist()
            assert greatest < own[0] and own == sorted(own)
            greatest = max(own[-1], whole.changes[-1].lsn)


@given(seeds)
def test_a_store_filled_by_changes_own_lsns_goes_on_without_a_rebuild(seed: int) -> None:
    """Versions were own LSNs once. What is changed from here on is right, also where the old rule had lost a row."""
    server, rng = Server(seed), random.Random(seed)
    old = server.committed[: rng.randint(0, len(server.committed))]
    store: Store = {}
    for rows in _captured(old, rng):
        _apply(store, _by_own_lsn(old, rows), {})
    wrong = _held(store).items() ^ _shown(_replayed(old)).items()
    end = Lsn(old[-1].end_lsn if old else START)
    entries = list(_captured(server.committed, rng, end))
    for rows in entries:
        _apply(store, rows, _shown(server.state()))
    later = pa.concat_tables([LOG_SCHEMA.empty_table(), *entries])
    touched = set(later["key"].to_pylist())
    kept = {item for item in wrong if item[0] not in touched} if "t" not in later["op"].to_pylist() else set()
    assert _held(store).items() ^ _shown(server.state()).items() == kept


def _by_own_lsn(history: list[Transaction], rows: pa.Table) -> pa.Table:
    """The same rows with the versions that they had by the old rule."""
    own = {
        whole.commit_lsn: [change.lsn for change in whole.changes for _ in range(1 + (change.op == "m"))]
        for whole in history
    }
    places = zip(*(rows[name].to_numpy().tolist() for name in ("commit_lsn", "ordinal")), strict=True)
    versions = pa.array([own[commit][ordinal] for commit, ordinal in places], pa.int64())
    return rows.set_column(rows.column_names.index("version"), LOG_SCHEMA.field("version"), versions)


@cache
def _server(seed: int) -> Server:
    return Server(seed)


def _lost_by_own_lsns(server: Server) -> bool:
    """Whether a store that compares own LSNs ends with other rows than the table."""
    store: Store = {}
    for rows in _captured(server.committed, random.Random(0)):
        _apply(store, _by_own_lsn(server.committed, rows), {})
    return _held(store) != _shown(server.state())


def test_the_model_can_do_what_the_old_rule_could_not() -> None:
    """COPY that waits, an insert that waits at another index, a key change that waits: in one history of some."""
    assert sum(_lost_by_own_lsns(_server(seed)) for seed in range(30)) >= 3


def test_the_model_overtakes_waits_and_moves_keys() -> None:
    histories = [_server(seed).committed for seed in range(20)]
    changes = [change for history in histories for whole in history for change in whole.changes]
    assert {change.op for change in changes} == set("cudmt")
    overtaken = [
        before.commit_lsn > whole.changes[0].lsn for history in histories for before, whole in pairwise(history)
    ]
    assert 0.2 < np.mean(overtaken) < 0.95

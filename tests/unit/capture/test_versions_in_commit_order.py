"""A change's version follows commit order, whatever its own place in the WAL (docs/adr/0013-versions.md)."""

from cdc.capture.pgoutput.decoder import Decoder
from cdc.capture.pgoutput.events import StreamCommit
from cdc.capture.transactions.assembly import Assembler, SpilledTransaction
from cdc.model import Entry, Lsn
from tests.corpus import pgoutput_encoder as pg
from tests.corpus.registry import Registry, enum_of
from tests.properties.test_assembly import Disk

ITEMS = pg.Relation(7, "public", "items", (("id", pg.INT8, True),))
AFTER = Lsn(50)


def _versions(frames: list[bytes], cuts: tuple[int, ...] = (), after: Lsn = AFTER, budget: int = 1 << 30) -> list[int]:
    """What goes into the log: the frames in feeds that end at these cuts."""
    decoder = Decoder(Registry(), enum_of, after=after)
    assembler = Assembler(after, budget, Disk)
    found: list[int] = []
    for start, end in zip((0, *cuts), (*cuts, len(frames)), strict=True):
        decoded = decoder.feed(frames[start:end])
        for item in assembler.take(decoded.rows, decoded.events, decoded.subxids):
            assert isinstance(item, (Entry, SpilledTransaction))
            for part in [item.rows] if isinstance(item, Entry) else item.parts():
                found += part["version"].to_numpy().tolist()
    return found


def _plain(commit: int, *rows: tuple[int, int]) -> list[bytes]:
    """A transaction that commits there; rows are (own LSN, id)."""
    inserts = [pg.frame(pg.insert(7, [b"%d" % key]), lsn) for lsn, key in rows]
    return [pg.frame(pg.begin(commit), commit), *inserts, pg.frame(pg.commit(commit, commit + 10), commit + 10)]


RELATION = pg.frame(pg.relation(ITEMS))
OVERTAKEN = [RELATION, *_plain(300, (200, 1), (210, 2)), *_plain(400, (120, 2), (130, 2), (350, 3))]
"""The second transaction wrote its first rows before the first one, and committed after it."""


def test_a_change_written_before_a_commit_that_overtook_it_is_newer_than_that_commit() -> None:
    assert _versions(OVERTAKEN) == [200, 210, 310, 310, 350]


def test_a_change_after_the_commit_before_it_keeps_its_own_lsn() -> None:
    frames = [RELATION, *_plain(300, (200, 1)), *_plain(400, (310, 1)), *_plain(500, (450, 1))]
    assert _versions(frames) == [200, 310, 450]


def test_cuts_between_feeds_change_no_version() -> None:
    for first in range(len(OVERTAKEN) + 1):
        for second in range(first, len(OVERTAKEN) + 1):
            assert _versions(OVERTAKEN, (first, second)) == [200, 210, 310, 310, 350]


def test_after_a_restart_the_end_of_the_log_counts_as_the_commit_before() -> None:
    frames = [RELATION, *_plain(400, (120, 2), (350, 3))]
    assert _versions(frames, after=Lsn(310)) == [310, 350]


def test_a_commit_right_at_the_end_of_the_log_is_still_below_the_next_one() -> None:
    """Its commit record may begin where the log ended: with that LSN as its version, the next must be greater."""
    frames = [RELATION, *_plain(310, (120, 2)), *_plain(400, (130, 2))]
    assert _versions(frames, after=Lsn(310)) == [310, 320]


def _streamed() -> list[bytes]:
    """A streamed transaction, overtaken by a plain one, followed by one that was open all the time."""
    block = [pg.frame(pg.stream_start(9, True)), pg.frame(pg.relation(ITEMS, 9))]
    block += [pg.frame(pg.insert(7, [b"1"], 9), 100), pg.frame(pg.stream_stop())]
    return [
        *block,
        RELATION,
        *_plain(300, (200, 1)),
        pg.frame(pg.stream_start(9, False)),
        pg.frame(pg.insert(7, [b"2"], 9), 320),
        pg.frame(pg.stream_stop()),
        pg.frame(pg.stream_commit(9, 400, 410), 410),
        *_plain(500, (150, 1), (450, 2)),
    ]


def test_a_streamed_transaction_gets_its_versions_at_its_commit() -> None:
    frames = _streamed()
    for cut in range(len(frames) + 1):
        assert _versions(frames, (cut,)) == [200, 310, 320, 410, 450]


def test_a_transaction_on_disk_gets_the_same_versions() -> None:
    assert _versions(_streamed(), budget=0) == [200, 310, 320, 410, 450]
    assert _versions(OVERTAKEN, budget=0, cuts=(5,)) == [200, 210, 310, 310, 350]


def test_a_stream_commit_says_where_the_commit_before_it_ended() -> None:
    decoded = Decoder(Registry(), enum_of, after=AFTER).feed(_streamed())
    (commit,) = [event for event in decoded.events if isinstance(event, StreamCommit)]
    assert commit.previous == 310

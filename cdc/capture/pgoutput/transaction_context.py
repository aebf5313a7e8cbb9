"""Which transaction each row of a feed belongs to, and its ordinal in it: one context per Begin or StreamStart, from
there to its end. The last one stays open across feeds.

Also where the previous transaction ended: no change may have a smaller version (docs/adr/0013-versions.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cdc.arrays import Bools, Ints
from cdc.capture.pgoutput.cursor import POSTGRES_EPOCH
from cdc.capture.pgoutput.events import Event, StreamAbort, StreamCommit, StreamStart
from cdc.capture.pgoutput.frames import COMMIT, Frames
from cdc.errors import DecodeError
from cdc.model import Lsn

_CLOSER = {ord("B"): ord("C"), ord("S"): ord("E")}
_OPENS, _CLOSES = np.zeros(256, np.uint8), np.zeros(256, np.bool_)
for _opener, _closer in _CLOSER.items():
    _OPENS[_opener] = _closer
    _CLOSES[_closer] = True
_OPENERS: Bools = _OPENS != 0
_TURNS: Bools = _OPENERS | _CLOSES
_STREAM = ord("S")


@dataclass(frozen=True, slots=True)
class RowTransactions:
    """Each row's transaction and its ordinal in it."""

    commit_lsn: Ints
    commit_ts: Ints
    xid: Ints
    ordinal: Ints
    previous: Ints
    """The end of the transaction committed before; 0 in a streamed block, whose commit position is not known yet."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """The messages of a feed that end a transaction, and their end LSNs; `ends[0]` is the last end before the feed."""

    messages: Ints
    ends: Ints

    def before(self, message: Ints) -> Ints:
        """The end of the last transaction that ended before each of these messages."""
        return self.ends[np.searchsorted(self.messages, message)]

    def merged_with(self, messages: Ints, ends: Ints) -> "_Ends":
        """These ends and the given ones, in stream order."""
        every = np.concatenate((self.messages, messages))
        order = np.argsort(every)
        return _Ends(every[order], np.concatenate((self.ends[:1], np.concatenate((self.ends[1:], ends))[order])))


@dataclass(slots=True)
class TransactionContexts:
    """The open transaction between feeds, and how many rows each streamed one has so far."""

    closer: int = 0
    """The message kind that ends the open context; 0: none is open."""
    commit_lsn: int = 0
    commit_ts: int = 0
    xid: int = 0
    ordinal: int = 0
    previous: int = 0
    """The end of the transaction committed before the open one."""
    ended: int = 0
    """The end of the newest committed transaction; at the start, the log's end."""
    streamed: dict[int, int] = field(default_factory=dict)

    @property
    def streaming(self) -> bool:
        """Whether a streamed block is open."""
        return self.closer == _CLOSER[_STREAM]

    def streamed_flags(self, frames: Frames) -> Bools | None:
        """Which messages of a feed are in a streamed block (None: none): those have a transaction id."""
        if not self.streaming and not frames.present[_STREAM]:
            return None
        kind = frames.kind
        starts = kind == _STREAM
        return np.cumsum(starts.astype(np.int8) - (kind == _CLOSER[_STREAM]).astype(np.int8)) + self.streaming > 0

    def check(self, frames: Frames, rows: Ints) -> None:
        """Raise DecodeError unless transactions begin and end in turn and every row is inside one."""
        kind = frames.kind
        turn = frames.of(_TURNS)
        kinds = kind[turn]
        expected = np.concatenate(([self.closer], _OPENS[kinds[:-1]])) if len(turn) else _OPENS[:0]
        wrong = np.where(expected == 0, _OPENS[kinds] == 0, kinds != expected)
        if wrong.any():
            at = int(turn[np.argmax(wrong)])
            raise DecodeError(f"Message {at} of the feed ends or begins a transaction out of turn", 0)
        opened = np.concatenate(([self.closer], _OPENS[kinds]))
        outside = opened[np.searchsorted(turn, rows)] == 0
        if outside.any():
            raise DecodeError(f"Message {int(rows[np.argmax(outside)])} of the feed is a row outside a transaction", 0)

    def assign(self, frames: Frames, found: dict[int, Event], counts: Ints, message: Ints) -> RowTransactions:
        """Assign rows to transactions and advance past the feed. `counts`: rows per message; `message`: of each row."""
        kind = frames.kind
        openers = frames.of(_OPENERS)
        before = np.cumsum(counts) - counts
        first = np.concatenate(([0], before[openers]))
        size = np.diff(np.concatenate((first, [len(message)])))
        lsn, ts, xid, carry, previous = (np.zeros(len(openers) + 1, np.int64) for _ in range(5))
        lsn[0], ts[0], xid[0], carry[0], previous[0] = (
            self.commit_lsn, self.commit_ts, self.xid, self.ordinal, self.previous
        )  # fmt: skip
        plain = np.flatnonzero(kind[openers] == ord("B"))
        at = frames.start[openers[plain]]
        lsn[plain + 1] = frames.u64(at + 1)
        ts[plain + 1] = frames.u64(at + 9) + POSTGRES_EPOCH
        xid[plain + 1] = frames.u32(at + 17)
        ends = self._ends(frames, found)
        previous[plain + 1] = ends.before(openers[plain])
        if len(plain) < len(openers) or self.streaming:
            self._assign_streamed(found, openers, xid, carry, size)
        context = np.searchsorted(openers, message, side="right")
        ordinal = np.arange(len(message)) - first[context] + carry[context]
        assigned = RowTransactions(lsn[context], ts[context], xid[context], ordinal, previous[context])
        self.commit_lsn, self.commit_ts, self.xid = int(lsn[-1]), int(ts[-1]), int(xid[-1])
        self.previous, self.ended = int(previous[-1]), int(ends.ends[-1])
        self.ordinal = int(carry[-1] + size[-1])
        self._close(frames)
        return assigned

    def _ends(self, frames: Frames, found: dict[int, Event]) -> "_Ends":
        """Where transactions end in this feed; sets `previous` of each StreamCommit."""
        commits = frames.of(COMMIT)
        ends = _Ends(commits, np.concatenate(([self.ended], frames.u64(frames.start[commits] + 10))))
        streamed = {index: event for index, event in found.items() if isinstance(event, StreamCommit)}
        if streamed:
            at = np.array(sorted(streamed), np.int64)
            ends = ends.merged_with(at, np.array([streamed[index].end_lsn for index in at.tolist()], np.int64))
            for index, before in zip(at.tolist(), ends.before(at).tolist(), strict=True):
                found[index] = streamed[index]._replace(previous=Lsn(before))
        return ends

    def _assign_streamed(self, found: Mapping[int, Event], openers: Ints, xid: Ints, carry: Ints, size: Ints) -> None:
        """Fill in the streamed blocks, which continue the ordinals of their transactions."""
        if self.streaming:
            self.streamed[self.xid] = self.ordinal + int(size[0])
        numbers = {int(message): at for at, message in enumerate(openers.tolist(), 1)}
        for message, event in sorted(found.items()):
            if isinstance(event, StreamStart):
                at = numbers[message]
                xid[at] = event.xid
                carry[at] = 0 if event.first else self.streamed.get(event.xid, 0)
                self.streamed[event.xid] = int(carry[at] + size[at])
            elif isinstance(event, StreamCommit) or (isinstance(event, StreamAbort) and event.xid == event.subxid):
                self.streamed.pop(event.xid, None)

    def _close(self, frames: Frames) -> None:
        if len(turn := frames.of(_TURNS)):
            self.closer = int(_OPENS[frames.kind[turn[-1]]])

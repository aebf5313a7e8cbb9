"""Transaction control messages turned into events: rare kinds one by one, Begin and Commit all at once."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from cdc.arrays import Ints
from cdc.capture.pgoutput import events
from cdc.capture.pgoutput.cursor import POSTGRES_EPOCH, MessageCursor
from cdc.capture.pgoutput.frames import BEGIN, COMMIT, Frames

Control = events.StreamStart | events.StreamStop | events.StreamCommit | events.StreamAbort | events.LogicalMessage


def stream_start(cursor: MessageCursor) -> events.StreamStart:
    return events.StreamStart(cursor.u32(), cursor.octet() == 1)


def stream_stop(cursor: MessageCursor) -> events.StreamStop:
    return events.StreamStop()


def stream_commit(cursor: MessageCursor) -> events.StreamCommit:
    xid = cursor.u32()
    cursor.octet()
    return events.StreamCommit(xid, cursor.lsn(), cursor.lsn(), cursor.time())


def stream_abort(cursor: MessageCursor) -> events.StreamAbort:
    return events.StreamAbort(cursor.u32(), cursor.u32())


def parallel_abort(cursor: MessageCursor) -> events.StreamAbort:
    """With `streaming 'parallel'` an abort also has an LSN and a time."""
    return events.StreamAbort(cursor.u32(), cursor.u32(), cursor.lsn(), cursor.time())


def logical_message(cursor: MessageCursor) -> events.LogicalMessage:
    transactional = cursor.octet() == 1
    lsn, prefix = cursor.lsn(), cursor.text()
    return events.LogicalMessage(prefix, cursor.octets(cursor.u32()), lsn, transactional)


def origin(cursor: MessageCursor) -> None:
    """The replication origin of a transaction: parsed, not used."""
    cursor.lsn()
    cursor.text()


def type_name(cursor: MessageCursor) -> None:
    """A type's name: parsed, not used. The catalog has the element or base type too, which this message lacks."""
    cursor.u32()
    cursor.text()
    cursor.text()


def truncated(message: memoryview, streamed: bool) -> list[int]:
    """The oids of the truncated relations."""
    cursor = MessageCursor(message)
    if streamed:
        cursor.u32()
    count = cursor.u32()
    cursor.octet()
    oids = cursor.octets(4 * count)
    cursor.end()
    return [int.from_bytes(oids[at : at + 4], "big") for at in range(0, len(oids), 4)]


PARSERS: dict[str, Callable[[MessageCursor], Control | None]] = {
    "S": stream_start,
    "E": stream_stop,
    "c": stream_commit,
    "A": stream_abort,
    "M": logical_message,
    "O": origin,
    "Y": type_name,
}


def ordered(frames: Frames, found: Mapping[int, events.Event], counts: Ints) -> list[events.Event]:
    """All events in stream order, each with the number of rows before it."""
    before = np.cumsum(counts) - counts
    begins, commits, others = frames.of(BEGIN), frames.of(COMMIT), np.array(list(found), np.int64)
    everything = [
        *_begins(frames, frames.start[begins], before[begins]),
        *_commits(frames, frames.start[commits], before[commits]),
        *(event._replace(row=int(before[index])) for index, event in found.items()),
    ]
    order = np.argsort(np.concatenate((begins, commits, others)), kind="stable")
    return [everything[at] for at in order.tolist()]


def _begins(frames: Frames, at: Ints, row: Ints) -> Iterator[events.Event]:
    times = frames.u64(at + 9) + POSTGRES_EPOCH
    return map(events.Begin, frames.u64(at + 1).tolist(), times.tolist(), frames.u32(at + 17).tolist(), row.tolist())


def _commits(frames: Frames, at: Ints, row: Ints) -> Iterator[events.Event]:
    times = frames.u64(at + 18) + POSTGRES_EPOCH
    return map(events.Commit, frames.u64(at + 2).tolist(), frames.u64(at + 10).tolist(), times.tolist(), row.tolist())

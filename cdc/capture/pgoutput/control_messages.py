"""Transactions begin, stop and end here: messages to events, one by one where they are rare, else all at once."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from cdc.capture.pgoutput import events
from cdc.capture.pgoutput.cursor import POSTGRES_EPOCH, MessageCursor
from cdc.capture.pgoutput.frames import BEGIN, COMMIT, Frames
from cdc.capture.rows.byte_spans import Places

Control = (
    events.StreamStart
    | events.StreamStop
    | events.StreamCommit
    | events.StreamAbort
    | events.BeginPrepare
    | events.Prepare
    | events.CommitPrepared
    | events.RollbackPrepared
    | events.StreamPrepare
    | events.LogicalMessage
)


def stream_start(reading: MessageCursor) -> events.StreamStart:
    return events.StreamStart(reading.u32(), reading.octet() == 1)


def stream_stop(reading: MessageCursor) -> events.StreamStop:
    return events.StreamStop()


def stream_commit(reading: MessageCursor) -> events.StreamCommit:
    xid = reading.u32()
    reading.octet()
    return events.StreamCommit(xid, reading.lsn(), reading.lsn(), reading.time())


def stream_abort(reading: MessageCursor) -> events.StreamAbort:
    return events.StreamAbort(reading.u32(), reading.u32())


def parallel_abort(reading: MessageCursor) -> events.StreamAbort:
    """With `streaming 'parallel'` an abort also says where and when."""
    return events.StreamAbort(reading.u32(), reading.u32(), reading.lsn(), reading.time())


def begin_prepare(reading: MessageCursor) -> events.BeginPrepare:
    return events.BeginPrepare(reading.lsn(), reading.lsn(), reading.time(), reading.u32(), reading.text())


def prepare(reading: MessageCursor) -> events.Prepare:
    reading.octet()
    return events.Prepare(reading.lsn(), reading.lsn(), reading.time(), reading.u32(), reading.text())


def stream_prepare(reading: MessageCursor) -> events.StreamPrepare:
    reading.octet()
    return events.StreamPrepare(reading.lsn(), reading.lsn(), reading.time(), reading.u32(), reading.text())


def commit_prepared(reading: MessageCursor) -> events.CommitPrepared:
    reading.octet()
    return events.CommitPrepared(reading.lsn(), reading.lsn(), reading.time(), reading.u32(), reading.text())


def rollback_prepared(reading: MessageCursor) -> events.RollbackPrepared:
    reading.octet()
    return events.RollbackPrepared(
        reading.lsn(), reading.lsn(), reading.time(), reading.time(), reading.u32(), reading.text()
    )


def logical_message(reading: MessageCursor) -> events.LogicalMessage:
    transactional = reading.octet() == 1
    lsn, prefix = reading.lsn(), reading.text()
    return events.LogicalMessage(prefix, reading.octets(reading.u32()), lsn, transactional)


def origin(reading: MessageCursor) -> None:
    """Where a transaction came from: known, and not needed."""
    reading.lsn()
    reading.text()


def type_name(reading: MessageCursor) -> None:
    """A type's name: the catalog is asked instead, because the name alone does not tell how a type is built."""
    reading.u32()
    reading.text()
    reading.text()


def truncated(message: memoryview, streamed: bool) -> list[int]:
    """The oids of the truncated relations."""
    reading = MessageCursor(message)
    if streamed:
        reading.u32()
    count = reading.u32()
    reading.octet()
    oids = reading.octets(4 * count)
    reading.end()
    return [int.from_bytes(oids[at : at + 4], "big") for at in range(0, len(oids), 4)]


PARSERS: dict[str, Callable[[MessageCursor], Control | None]] = {
    "S": stream_start,
    "E": stream_stop,
    "c": stream_commit,
    "A": stream_abort,
    "b": begin_prepare,
    "P": prepare,
    "p": stream_prepare,
    "K": commit_prepared,
    "r": rollback_prepared,
    "M": logical_message,
    "O": origin,
    "Y": type_name,
}


def ordered(frames: Frames, found: Mapping[int, events.Event], counts: Places) -> list[events.Event]:
    """Everything but rows, in stream order, each with the number of rows before it."""
    before = np.cumsum(counts) - counts
    begins, commits, others = frames.of(BEGIN), frames.of(COMMIT), np.array(list(found), np.int64)
    everything = [
        *_begins(frames, frames.start[begins], before[begins]),
        *_commits(frames, frames.start[commits], before[commits]),
        *(event._replace(row=int(before[index])) for index, event in found.items()),
    ]
    order = np.argsort(np.concatenate((begins, commits, others)), kind="stable")
    return [everything[at] for at in order.tolist()]


def _begins(frames: Frames, at: Places, row: Places) -> Iterator[events.Event]:
    times = frames.u64(at + 9) + POSTGRES_EPOCH
    return map(events.Begin, frames.u64(at + 1).tolist(), times.tolist(), frames.u32(at + 17).tolist(), row.tolist())


def _commits(frames: Frames, at: Places, row: Places) -> Iterator[events.Event]:
    times = frames.u64(at + 18) + POSTGRES_EPOCH
    return map(events.Commit, frames.u64(at + 2).tolist(), frames.u64(at + 10).tolist(), times.tolist(), row.tolist())

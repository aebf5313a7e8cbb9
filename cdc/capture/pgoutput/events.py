"""What a WAL stream contains besides rows. `row` is the number of rows of the feed before the event.

Tuples, because a stream of small transactions makes two of them per row. Times are microseconds since 1970.
"""

from collections.abc import Mapping
from typing import NamedTuple

from cdc.capture.replication.captured_tables import WaitReason
from cdc.model import ZERO_LSN, Lsn, TableId, TableSchema


class Begin(NamedTuple):
    """A complete transaction follows. `final_lsn` is its commit record: the rows' `commit_lsn`."""

    final_lsn: Lsn
    commit_ts: int
    xid: int
    row: int = 0


class Commit(NamedTuple):
    """The transaction that began last is complete; `end_lsn` may be confirmed once its rows are durable."""

    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int
    row: int = 0


class StreamStart(NamedTuple):
    """Rows of a transaction still in progress follow. They have no commit LSN yet (0) and may be aborted."""

    xid: int
    first: bool
    row: int = 0


class StreamStop(NamedTuple):
    """The block of the streamed transaction ends; blocks of others may follow before its next one."""

    row: int = 0


class StreamCommit(NamedTuple):
    """The streamed transaction is complete: its rows get this commit LSN and time, and the ids of its new schemas."""

    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int
    row: int = 0
    schemas: Mapping[int, int] = {}
    """The recorded ids by the provisional ids in its rows."""
    previous: Lsn = ZERO_LSN
    """The end of the transaction committed before it: no row of this one has a smaller version."""


class StreamAbort(NamedTuple):
    """Drop the rows of `subxid` so far; all rows of the transaction if it equals `xid`. `abort_lsn` 0: not sent."""

    xid: int
    subxid: int
    abort_lsn: Lsn = Lsn(0)
    abort_ts: int = 0
    row: int = 0


class LogicalMessage(NamedTuple):
    """`pg_logical_emit_message`. Not transactional: it arrives even if its transaction was rolled back."""

    prefix: str
    content: bytes
    lsn: Lsn
    transactional: bool
    xid: int = 0
    row: int = 0


class TableWaits(NamedTuple):
    """This captured table cannot be captured from here on: none of its later rows is decoded."""

    table: TableId
    reason: WaitReason
    row: int = 0


class RelationChanged(NamedTuple):
    """The following rows of this table have this schema, as recorded in the registry."""

    schema: TableSchema
    row: int = 0


Event = (
    Begin
    | Commit
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | LogicalMessage
    | RelationChanged
    | TableWaits
)

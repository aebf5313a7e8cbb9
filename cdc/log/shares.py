"""Shares of a micro-batch: what each task of a cluster reads for itself.

A share is text: the offsets and the part of the keys between them. All changes of a key in a batch are in one share, so
tasks need not exchange rows. On a cluster a stream has one row per share instead of the changes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

from cdc.log.key_hash import BUCKETS
from cdc.model import Lsn
from cdc.ports import Offset

SHARE_ROWS = 1_000
"""Minimum rows per share: a task on a cluster costs some 20 ms, a thousand rows cost a store about as much."""
_FIELDS: dict[str, pa.DataType] = {"share": pa.string(), "part": pa.string(), "progress": pa.string()}
PLANNED = pa.schema(_FIELDS)
"""The rows of a planned micro-batch. `part` names the share's part of all keys, the same in every batch of as many
shares. `progress` is in one of the rows: what the whole batch reaches."""


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Where a batch ends: the LSN up to which it is complete, and the offset."""

    end: Lsn
    offset: Offset

    def encoded(self) -> str:
        """The value of the column `progress`."""
        return json.dumps([self.end, self.offset])

    @classmethod
    def decoded(cls, text: str) -> "BatchProgress":
        """The inverse of `encoded`."""
        end, offset = json.loads(text)
        return cls(Lsn(end), Offset(offset))


def share_count(rows: int, tasks: int) -> int:
    """How many shares a batch of so many rows has, at most `tasks`."""
    return max(1, min(tasks, rows // SHARE_ROWS))


def bucket_ranges(count: int) -> Sequence[tuple[int, int]]:
    """`count` ranges of buckets, from the first up to, not including, the second."""
    bounds = [BUCKETS * at // count for at in range(count + 1)]
    return list(pairwise(bounds))

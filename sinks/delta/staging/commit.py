"""Makes what several tasks have staged visible in one commit, in the driver: only row numbers pass through it."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from deltalake import CommitProperties, Transaction
from deltalake.exceptions import CommitFailedError

from cdc.arrays import Ints
from cdc.errors import Busy, SinkError
from sinks.delta.deletion_vectors.live_table import joined
from sinks.delta.files.transaction_log import Action
from sinks.delta.staging.plan import StagingPlan
from sinks.delta.staging.stage import Places, StagedFiles
from sinks.delta.store import DeltaStore
from sinks.delta.write.merge import WRITER

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from cdc.model import TableId

LONGEST_WAIT = 1800.0
"""Seconds after which staged files are no longer committed: maintenance removes files that no commit has, at the
earliest after an hour (`keep_history_hours`)."""


def commit(store: DeltaStore, plan: StagingPlan, staged: Sequence[StagedFiles]) -> None:
    """One commit, or none if nothing was staged. Raises Busy if the plan is not of the newest version."""
    _check(staged, plan, store.table)
    store.commit_at(plan.version, lambda table: _commit(store, table, plan, staged))


def _commit(store: DeltaStore, table: "DeltaTable", plan: StagingPlan, staged: Sequence[StagedFiles]) -> None:
    """A merge of small files is left out where another task has replaced rows of them: then these are still needed."""
    if store.vectors is None or not store.vectors.live.follow(table):
        raise CommitFailedError("the table's log was cleaned up in between")
    live = store.vectors.live
    replaced = np.sort(np.concatenate([np.zeros(0, np.uint64), *(one.replaced for one in staged)]))
    adds = [add for one in staged for add in one.adds]
    if (replaced[1:] == replaced[:-1]).any() or len({add["path"] for add in adds}) < len(adds):
        raise SinkError(
            f"table {store.table}: two tasks have staged the same row. Nothing was written.",
            "This is a fault in Millrace: report it with the version and the log of this process.",
        )
    if not adds:
        return
    files, starts, counts = np.unique(replaced >> np.uint64(32), return_index=True, return_counts=True)
    marks = dict(zip(files.tolist(), counts.tolist(), strict=True))
    merges = [one for one in staged if one.merged and _is_alone(one, marks)]
    merged = {number for one in merges for number in one.merged}
    adds += [add for one in merges for add in one.merged_adds]
    paths, before = plan.paths, live.deleted(table)
    deleted: dict[str, Ints] = {}
    rows = (replaced & np.uint64(0xFFFFFFFF)).astype(np.int64)
    for number, start in zip(files.tolist(), starts.tolist(), strict=True):
        if number not in merged:
            path, new = paths[number], rows[start : start + marks[number]]
            deleted[path] = joined(before.get(path), new)
    lsn = max(table.transaction_version(WRITER) or 0, *(one.lsn for one in staged))
    own = CommitProperties(custom_metadata={WRITER: str(lsn)}, app_transactions=[Transaction(WRITER, lsn)])
    live.commit(table, own, adds, deleted, [paths[number] for number in sorted(merged)])


def _check(staged: Sequence[StagedFiles], plan: StagingPlan, name: "TableId") -> None:
    oldest = min((_written(add) for one in staged for add in one.adds), default=time.time())
    if any(one.version != plan.version for one in staged) or time.time() - oldest > LONGEST_WAIT:
        raise Busy(f"table {name}: what was staged is for another version, or too old.", "It is staged again.", 0.0)


def _written(add: Action) -> float:
    return float(add["modificationTime"]) / 1000


def _is_alone(one: StagedFiles, marks: dict[int, int]) -> bool:
    """Whether no other task has replaced rows of the files that this one has merged."""
    return sum(marks.get(number, 0) for number in one.merged) == _count_in(one.replaced, one.merged)


def _count_in(replaced: Places, files: Sequence[int]) -> int:
    return int(np.isin(replaced >> np.uint64(32), np.array(files, np.uint64)).sum())

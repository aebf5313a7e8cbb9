"""The status file of the capture process, written about once a second."""

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Self

from cdc.capture.replication.captured_tables import WaitReason
from cdc.capture.replication.loop import CaptureLoop, LoopStatus
from cdc.capture.source.monitor import SourceMonitor
from cdc.capture.source.partitions import Partitions
from cdc.model import TableId, format_lsn
from cdc.service.capture.table_changes import TableChanges
from cdc.service.capture.view_output import ViewOutput
from cdc.service.state import status
from snapshots.backfill.coordinator import Backfills
from snapshots.initial.snapshot import SnapshotProgress

_EVERY = 1.0


class CaptureStatus:
    """Writes `status/capture.json` in a thread while the `with` block runs."""

    def __init__(
        self, state: Path, history_exact_from: str, tables_waiting: Mapping[TableId, WaitReason] | None = None
    ) -> None:
        self._folder = state
        self._state, self._trouble = "starting", ""
        self.history_exact_from = history_exact_from
        """From the log at the start; later `Backfills` has it. Part of the first status already: without it, positions
        would count as if there were no snapshot to wait for."""
        self._tables_waiting = tables_waiting or {}
        self._snapshot: SnapshotProgress | None = None
        self._loop: CaptureLoop | None = None
        self._monitor: SourceMonitor | None = None
        self._backfills: Backfills | None = None
        self._partitions: Partitions | None = None
        self._table_changes: TableChanges | None = None
        self.views: ViewOutput | None = None
        """Appends the output of views: its counts are reported as those of captured tables are."""
        self._last = (monotonic(), 0, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Self:
        with suppress(OSError):  # a full disk: written as soon as there is room
            self.publish()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._state = "stopped" if kind is None else "failed"
        with suppress(OSError):
            self.publish()

    def set_state(self, state: str, trouble: str = "") -> None:
        """The state before the stream starts."""
        self._state, self._trouble = state, trouble

    def snapshot(self, progress: SnapshotProgress) -> None:
        """The snapshot's progress."""
        self._snapshot = progress

    def attach(
        self,
        loop: CaptureLoop,
        monitor: SourceMonitor,
        backfills: Backfills,
        table_changes: TableChanges,
        partitions: Partitions,
    ) -> None:
        """Report the state of these from now on."""
        self._loop, self._monitor, self._backfills, self._table_changes = loop, monitor, backfills, table_changes
        self._partitions = partitions
        self._state = "streaming"

    def publish(self) -> None:
        """Write the file."""
        facts: dict[str, object] = {"state": self._state, "trouble": self._trouble, "error": {}}
        facts["history_exact_from"] = self.history_exact_from
        if self._snapshot is not None:
            facts["snapshot"] = asdict(self._snapshot)
        if self._monitor is not None:
            facts["slot_retained_bytes"] = self._monitor.state.retained_bytes
            facts["slot_wal_status"] = self._monitor.state.wal_status
            facts["slot_safe_bytes"] = self._monitor.state.safe_bytes
            facts["source_lsn"] = self._monitor.state.source_lsn
            facts["looked_at"] = self._monitor.state.at
        if self._backfills is not None:
            facts["backfills"] = self._backfills.facts()
            facts["history_exact_from"] = self._backfills.history_exact_from
        if self._partitions is not None:
            facts["notices"] = [str(notice) for notice in self._partitions.notices]
        waiting = self._tables_waiting if self._table_changes is None else self._table_changes.waiting()
        facts["tables_waiting"] = {str(table): asdict(reason) for table, reason in sorted(waiting.items())}
        if self._table_changes is not None:
            facts["captured"] = [str(table.name) for table in self._table_changes.settings.source.tables]
            facts["tables_outcome"] = self._table_changes.outcome
        if self._loop is not None:
            facts |= self._of_loop(self._loop.status)
        if self.views is not None:
            facts = _with_views(facts, self.views)
        status.publish(self._folder, "capture", facts)

    def _of_loop(self, loop_status: LoopStatus) -> dict[str, object]:
        return {
            "state": loop_status.state if self._state == "streaming" else self._state,
            "trouble": loop_status.trouble,
            "watermark": loop_status.watermark,
            "durable": loop_status.durable,
            "received": loop_status.received,
            "lsn": format_lsn(loop_status.watermark),
            "queued_bytes": loop_status.queued_bytes,
            "changes": _by_table(loop_status.changes),
            "changes_total": loop_status.rows,
            "bytes_total": loop_status.size,
            "last_commit_at": loop_status.last_commit,
            "tables": _newest(loop_status.newest),
            "reconnects": loop_status.reconnects,
            **self._rates(loop_status),
        }

    def _rates(self, loop_status: LoopStatus) -> dict[str, float]:
        now = monotonic()
        then, rows, size = self._last
        self._last = (now, loop_status.rows, loop_status.size)
        seconds = max(now - then, 0.001)
        return {
            "changes_per_second": round((loop_status.rows - rows) / seconds, 1),
            "bytes_per_second": round((loop_status.size - size) / seconds, 1),
        }

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            with suppress(OSError):  # a full disk: readers of the file see its age
                self.publish()


def _with_views(facts: Mapping[str, object], views: ViewOutput) -> dict[str, object]:
    """The facts with the rows of views beside those of captured tables."""
    counted = views.counts.totals()
    more = {"changes": _by_table(counted.changes), "tables": _newest(counted.newest)}
    joined = {
        name: {**known, **own} if isinstance(known := facts.get(name), dict) else own for name, own in more.items()
    }
    return {**facts, **joined, "views_trouble": views.trouble}


def _by_table(changes: Mapping[tuple[str, str], int]) -> dict[str, object]:
    found: dict[str, dict[str, int]] = {}
    for (table, op), count in sorted(changes.items()):
        found.setdefault(table, {})[op] = count
    return dict(found)


def _newest(newest: Mapping[str, tuple[int, datetime]]) -> dict[str, object]:
    return {table: {"lsn": lsn, "at": at} for table, (lsn, at) in sorted(newest.items())}

"""What the capture process says of itself, about once a second."""

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Self

from cdc.capture.replication.captured_tables import WaitReason
from cdc.capture.replication.loop import CaptureLoop, LoopStatus
from cdc.capture.source.monitor import SourceMonitor
from cdc.capture.source.partitions import Partitions
from cdc.model import TableId, format_lsn
from cdc.service.capture.table_changes import TableChanges
from cdc.service.state import status
from snapshots.backfill.coordinator import Backfills
from snapshots.initial.snapshot import SnapshotProgress

_EVERY = 1.0


class CaptureStatus:
    """Publishes `status/capture.json` from a thread of its own, from `with` to its end."""

    def __init__(
        self, state: Path, history_exact_from: str, tables_waiting: Mapping[TableId, WaitReason] | None = None
    ) -> None:
        self._folder = state
        self._state, self._trouble = "starting", ""
        self.history_exact_from = history_exact_from
        """As the log knew it at the start: what counts until backfills go on with it. Said from the first word on:
        without it, positions would count as where nobody takes a snapshot."""
        self._tables_waiting = tables_waiting or {}
        self._snapshot: SnapshotProgress | None = None
        self._reader: CaptureLoop | None = None
        self._watch: SourceMonitor | None = None
        self._backfills: Backfills | None = None
        self._partitions: Partitions | None = None
        self._following: TableChanges | None = None
        self._last = (monotonic(), 0, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Self:
        with suppress(OSError):  # a full disk: said again as soon as there is room
            self.publish()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._state = "stopped" if kind is None else "failed"
        with suppress(OSError):
            self.publish()

    def say(self, state: str, trouble: str = "") -> None:
        """What is being done before the stream."""
        self._state, self._trouble = state, trouble

    def snapshot(self, progress: SnapshotProgress) -> None:
        """How far the snapshot is."""
        self._snapshot = progress

    def follow(
        self,
        reader: CaptureLoop,
        watch: SourceMonitor,
        backfills: Backfills,
        following: TableChanges,
        partitions: Partitions,
    ) -> None:
        """From now on the reader's state counts."""
        self._reader, self._watch, self._backfills, self._following = reader, watch, backfills, following
        self._partitions = partitions
        self._state = "streaming"

    def publish(self) -> None:
        """Write the file once."""
        facts: dict[str, object] = {"state": self._state, "trouble": self._trouble, "error": {}}
        facts["history_exact_from"] = self.history_exact_from
        if self._snapshot is not None:
            facts["snapshot"] = asdict(self._snapshot)
        if self._watch is not None:
            facts["slot_retained_bytes"] = self._watch.seen.retained_bytes
            facts["slot_wal_status"] = self._watch.seen.wal_status
            facts["slot_safe_bytes"] = self._watch.seen.safe_bytes
            facts["source_lsn"] = self._watch.seen.source_lsn
            facts["looked_at"] = self._watch.seen.at
        if self._backfills is not None:
            facts["backfills"] = self._backfills.facts()
            facts["history_exact_from"] = self._backfills.history_exact_from
        if self._partitions is not None:
            facts["notices"] = [str(notice) for notice in self._partitions.said]
        waiting = self._tables_waiting if self._following is None else self._following.waiting()
        facts["tables_waiting"] = {str(table): asdict(reason) for table, reason in sorted(waiting.items())}
        if self._following is not None:
            facts["captured"] = [str(table.name) for table in self._following.settings.source.tables]
            facts["tables_outcome"] = self._following.outcome
        if self._reader is not None:
            facts |= self._of_reader(self._reader.status)
        status.publish(self._folder, "capture", facts)

    def _of_reader(self, seen: LoopStatus) -> dict[str, object]:
        changes: dict[str, dict[str, int]] = {}
        for (table, op), count in sorted(seen.changes.items()):
            changes.setdefault(table, {})[op] = count
        return {
            "state": seen.state if self._state == "streaming" else self._state,
            "trouble": seen.trouble,
            "watermark": seen.watermark,
            "durable": seen.durable,
            "received": seen.received,
            "lsn": format_lsn(seen.watermark),
            "queued_bytes": seen.queued_bytes,
            "changes": changes,
            "changes_total": seen.rows,
            "bytes_total": seen.size,
            "last_commit_at": seen.last_commit,
            "tables": {table: {"lsn": lsn, "at": at} for table, (lsn, at) in sorted(seen.newest.items())},
            "reconnects": seen.reconnects,
            **self._rates(seen),
        }

    def _rates(self, seen: LoopStatus) -> dict[str, float]:
        now = monotonic()
        then, rows, size = self._last
        self._last = (now, seen.rows, seen.size)
        seconds = max(now - then, 0.001)
        return {
            "changes_per_second": round((seen.rows - rows) / seconds, 1),
            "bytes_per_second": round((seen.size - size) / seconds, 1),
        }

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            with suppress(OSError):  # a full disk: whoever reads the file sees that it is old
                self.publish()

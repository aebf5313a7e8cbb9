"""One sink at work: its query or its part in a shared one, its held-back tables, its losses and its dead letters."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from cdc.config.settings import Settings, SinkSettings
from cdc.errors import MillraceError
from cdc.model import ZERO_LSN, Lsn, TableId, format_lsn
from cdc.ports import Consumer, LogReader
from cdc.service.apply.driver import applier_of, stop_aware
from cdc.service.apply.held_back_tables import HeldBackTables, TableRequests
from cdc.service.apply.lost_tables import LostTables
from cdc.service.apply.refill import TableRefill, emitted_again
from cdc.service.apply.reselect import SourceRows
from cdc.service.apply.runner import SinkRunner
from cdc.service.state import status
from cdc.service.state.gaps import GapFile
from cdc.service.state.pauses import Paused
from cdc.service.state.skipped_tables import Skipped, SkippedTables
from sinks.apply.batch_buffer import BatchBuffer
from sinks.apply.errors import Stopped, TableLost
from sinks.context import SinkContext
from sinks.spark.query import SinkQuery
from sinks.spark.shared_query import SharedQuerySink
from views.dropped import dropped_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GRACE = 20.0
_CHECK_SECONDS = 1.0
_NO_REQUESTS = TableRequests()
_log = logging.getLogger(__name__)
Spark = Callable[[], "SparkSession"]


class SinkWorker:
    """One sink at work. Its `stop` ends this sink only."""

    def __init__(
        self,
        settings: Settings,
        sink: SinkSettings,
        log: LogReader,
        spark: Spark,
        requests: TableRequests = _NO_REQUESTS,
    ) -> None:
        self.sink = sink
        self._requests = requests
        self._state = settings.state
        self.stop = threading.Event()
        self._gap = GapFile(settings, sink, log)  # before the query registers the sink as a consumer
        context = SinkContext(settings.state, spark, stop_aware(self.stop))
        self._rows = SourceRows(settings.source)
        refill = TableRefill(settings, log)
        self._losses = LostTables(settings, sink, log, refill)
        self._losses.follow(requests)
        self._on_cluster = settings.spark.on_cluster
        self.applier = applier_of(
            settings,
            sink,
            log,
            context,
            self.stop,
            rows=self._rows,
            watch=self._losses,
            by_tasks=self._on_cluster,
        )
        self.runner = SinkRunner(SinkQuery(sink, log, self.applier, settings.state / "checkpoints", self.stop))
        skipped = SkippedTables(settings.state, sink.name)
        self._held_back = HeldBackTables(log, self.applier, skipped, refill, requests)
        self._held_back.restore()
        self._shared: SharedQuerySink | None = None
        self._handover: threading.Thread | None = None
        threading.Thread(target=self._run_checks, name=f"sink-{sink.name}", daemon=True).start()

    def follow(self, settings: Settings, paused: Paused) -> None:
        """Use reloaded settings and the present pauses."""
        self._rows.follow(settings.source)
        self._requests = requests_of(settings, self.sink, paused)
        self._losses.follow(self._requests)

    def run_query(self, spark: "SparkSession") -> None:
        """Start the sink's own query, or restart it if it failed. Nothing to do while it shares one."""
        if self._shared is not None:
            self._check_shared(self._shared)
        elif self.needs_start:
            self.runner.start(spark)
        elif not self._in_shared_query:
            self.runner.tend(spark)

    @property
    def needs_start(self) -> bool:
        """Whether its own query has to be started."""
        return not self._in_shared_query and not self.runner.query.has_own_query and self.runner.restart_at is None

    def end(self) -> None:
        """Finish the present batch, keep the position, release the checkpoint."""
        self.stop.set()
        if self._shared is not None:
            self._shared.leave(GRACE)
        self.runner.query.halt(GRACE)

    # -- sharing a query with other sinks

    @property
    def may_share(self) -> bool:
        """Whether it may share a query: not with a trigger interval, nor on a cluster, where tasks serve one sink."""
        return not self._on_cluster and self.sink.query == "shared" and not self.sink.trigger_seconds

    @property
    def shares(self) -> bool:
        """Whether it takes its batches from a shared query."""
        return self._shared is not None and self._shared.active

    @property
    def own_position(self) -> Lsn:
        """The LSN that its own query has reached; 0 if it has none, or the query does not run."""
        well = (
            self.runner.query.has_own_query
            and self.runner.restart_at is None
            and self.applier.status.state == "running"
        )
        return self.applier.status.reached if well and not self._in_shared_query else ZERO_LSN

    def can_start_shared(self, position: Consumer) -> bool:
        """Whether a shared query can start for it at its committed position."""
        if self.runner.query.has_own_query:
            return ZERO_LSN < position.reached <= self.own_position
        return (
            not self._in_shared_query and self.runner.restart_at is None and not self.runner.query.uses_own_checkpoint
        )

    def join_shared(self, buffer: BatchBuffer) -> None:
        """Take batches from a shared query, whose buffer knows this sink already. Its own query ends meanwhile."""
        self.runner.query.share()
        self.runner.started = self.runner.started or time.monotonic()
        self._shared = SharedQuerySink(self.sink, self.applier, buffer)
        name = f"hand-{self.sink.name}"
        self._handover = threading.Thread(target=self.runner.query.hand_over, name=name, daemon=True)
        self._handover.start()

    def leave_shared(self, failure: str) -> None:
        """The shared query failed: wait for the next one."""
        if self._shared is not None:
            self._shared.leave(0.0)
            self._shared = None
            self.applier.status.state, self.applier.status.error = "failed", failure

    @property
    def _in_shared_query(self) -> bool:
        """Whether it shares a query, or its own has not ended yet."""
        return self._shared is not None or (self._handover is not None and self._handover.is_alive())

    def _check_shared(self, shared: SharedQuerySink) -> None:
        if shared.active:
            return
        self._shared = None
        if shared.error is None:
            _log.info("sink %s is behind the others and continues with its own query", self.sink.name)
        else:
            self.runner.failed(shared.error)

    # -- the status

    def facts(self) -> dict[str, object]:
        """For the status."""
        facts = asdict(self.applier.status)
        reached = format_lsn(self.applier.status.reached)
        more: dict[str, object] = {"shared": self.shares, **self._table_facts()}
        if gap := self._gap.gap():
            more["gap"] = gap.facts()
        if losses := self._losses.facts():
            more["losses"] = losses
        return {**facts, "reached": reached, "facts": dict(self.applier.facts), **more}

    def _table_facts(self) -> dict[str, object]:
        """Paused, waiting, skipped and refilling tables."""
        tables = self._held_back
        waiting = {str(table): one.facts(self.sink.name, table) for table, one in sorted(tables.waiting.items())}
        skipped = tables.skipped.all().items()
        return {
            "held": _names(tables.paused_now() & self._requests.paused),
            "tables_waiting": waiting,
            "tables_skipped": _names(tables.skipped_now()),
            "tables_refilling": {str(table): self._refilling(table, one) for table, one in skipped if one.refill},
        }

    # -- in a thread of its own

    def _run_checks(self) -> None:
        """Once a second, beside the batches: connect to the store while Spark starts, so that an idle sink shows as
        running; hold back and release tables; refill lost ones; retry dead letters on request."""
        while True:
            try:
                self._check()
            except Stopped:
                return
            except TableLost:
                _log.debug("sink %s: a table was lost while it was catching up", self.sink.name)
            except MillraceError as error:
                _log.debug("sink %s: %s", self.sink.name, error)
            except Exception:
                _log.exception("the checks of sink %s failed", self.sink.name)
            if self.stop.wait(_CHECK_SECONDS):
                return

    def _check(self) -> None:
        if self.applier.status.state in ("starting", "refused"):
            self.applier.open_store()
        self.applier.check_losses()
        self.applier.retry_dead_letters()
        if self.runner.started:
            self._losses.repair(self.applier)
            self._held_back.follow(self._losses.with_lost(self._requests))
        self._end_refills()

    def _end_refills(self) -> None:
        """Forget the skipped tables whose rows are complete again."""
        refilling = {table: one for table, one in self._held_back.skipped.all().items() if one.refill}
        capture = status.read(self._state, "capture") if refilling else {}
        for table, one in refilling.items():
            view = table in self._requests.views
            if one.emptied and (emitted_again(self._state, table) if view else one.refilled(table, capture)):
                self._held_back.skipped.remove(table)

    def _refilling(self, table: TableId, one: Skipped) -> dict[str, str]:
        lacks = f"lacks rows of {table}, which was skipped, until"
        if table in self._requests.views:
            return {"message": f"{lacks} the view has handed them over again", "remedy": "See: millrace view list"}
        remedy = f"See: millrace backfill (to request it again: millrace backfill {table})"
        return {"message": f"{lacks} backfill {one.refill} has ended", "remedy": remedy}


def requests_of(settings: Settings, sink: SinkSettings, paused: Paused) -> TableRequests:
    """What is requested of a sink's tables. A table that left the pipeline does not belong to the sink any more, but
    the truncate of a view that was dropped does."""
    known = set(settings.tables) if settings.captured else set()
    tables = frozenset(table for table in settings.tables_of(sink) if not known or table in known)
    if tables and not sink.tables:
        tables |= dropped_tables(settings.state)
    paused_tables = frozenset(table for table in map(TableId.parse, paused.tables) if not tables or table in tables)
    skipped = frozenset(map(TableId.parse, paused.skipped.get(sink.name, ())))
    views = frozenset(view.table for view in settings.views)
    return TableRequests(tables, paused_tables, skipped, views, paused.resumed)


def _names(tables: Iterable[TableId]) -> list[str]:
    return sorted(map(str, tables))

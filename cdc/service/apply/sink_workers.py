"""The sinks at work, as the pipeline file and the pauses want them: begun and ended one by one while the others run.

Each has its own stop, so that one may be paused, changed or taken out without a word to its neighbours.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from cdc.config.settings import Settings, SinkSettings
from cdc.errors import MillraceError
from cdc.model import ZERO_LSN, Lsn, TableId, format_lsn
from cdc.ports import Consumer, LogReader
from cdc.service.apply.driver import applier_of, stop_aware
from cdc.service.apply.lost_tables import LostTables
from cdc.service.apply.paused_tables import PausedTables, TableRequests
from cdc.service.apply.refill import SourceRefill
from cdc.service.apply.reselect import SourceRows
from cdc.service.apply.runner import SinkRunner
from cdc.service.apply.shared_queries import SharedQueries
from cdc.service.state import status
from cdc.service.state.gaps import GapFile
from cdc.service.state.pauses import Paused
from cdc.service.state.skipped_tables import Skipped, SkippedTables
from sinks.apply.applier import Applier
from sinks.apply.batch_buffer import BatchBuffer
from sinks.apply.errors import Stopped, TableLost
from sinks.context import SinkContext
from sinks.spark.query import SinkQuery
from sinks.spark.shared_query import SharedQuerySink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GRACE = 20.0
_ATTEND = 1.0
_NO_WISHES = TableRequests()
_log = logging.getLogger(__name__)
Spark = Callable[[], "SparkSession"]


class SinkWorker:
    """One sink at work."""

    def __init__(
        self, settings: Settings, sink: SinkSettings, log: LogReader, spark: Spark, wishes: TableRequests = _NO_WISHES
    ) -> None:
        self.sink = sink
        self.wishes = wishes
        self._state = settings.state
        self.stop = threading.Event()
        self._gap = GapFile(settings, sink, log)  # before the query registers it as a reader
        context = SinkContext(settings.state, spark, stop_aware(self.stop))
        self.rows = SourceRows(settings.source)
        refill = SourceRefill(settings)
        self.losses = LostTables(settings, sink, log, refill.ask)
        self.losses.follow(wishes)
        self.applier = applier_of(settings, sink, log, context, self.stop, rows=self.rows, watch=self.losses)
        self.runner = SinkRunner(SinkQuery(sink, log, self.applier, settings.state / "checkpoints", self.stop))
        skipped = SkippedTables(settings.state, sink.name)
        self._holds = PausedTables(log, self.applier, skipped, refill, wishes)
        self._holds.restore()
        self._member: SharedQuerySink | None = None
        self._handing: threading.Thread | None = None
        threading.Thread(target=self._attend, name=f"sink-{sink.name}", daemon=True).start()

    def tend(self, spark: "SparkSession") -> None:
        """Start the query the first time, and again whenever it has failed."""
        if self._member is not None:
            self._left(self._member)
        elif self.to_begin:
            self.runner.start(spark)
        elif not self._between:
            self.runner.tend(spark)

    @property
    def to_begin(self) -> bool:
        """Whether it waits for a query of its own to be started."""
        return not self._between and not self.runner.query.alone and self.runner.restart_at is None

    def end(self) -> None:
        """Let the batch in hand end, keep the position, let go of the checkpoint."""
        self.stop.set()
        if self._member is not None:
            self._member.leave(GRACE)
        self.runner.query.halt(GRACE)

    # -- sharing a query with others

    @property
    def willing(self) -> bool:
        """Whether it may share one: its pace is nobody else's business otherwise."""
        return self.sink.query == "shared" and not self.sink.trigger_seconds

    @property
    def aboard(self) -> bool:
        """Whether a shared query brings its batches."""
        return self._member is not None and self._member.aboard

    @property
    def level(self) -> Lsn:
        """How far a query of its own has brought it; 0 where there is none, or something is wrong with it."""
        well = self.runner.query.alone and self.runner.restart_at is None and self.applier.status.state == "running"
        return self.applier.status.reached if well and not self._between else ZERO_LSN

    def ready(self, position: Consumer) -> bool:
        """Whether the position kept with the log says how far it is, and nothing is wrong with it."""
        if self.runner.query.alone:
            return ZERO_LSN < position.reached <= self.level
        return not self._between and self.runner.restart_at is None and not self.runner.query.independent

    def board(self, ring: BatchBuffer) -> None:
        """Take batches from a shared query, which has a place for it; a query of its own ends meanwhile."""
        self.runner.query.share()
        self.runner.started = self.runner.started or time.monotonic()
        self._member = SharedQuerySink(self.sink, self.applier, ring)
        self._handing = threading.Thread(target=self.runner.query.hand_over, name=f"hand-{self.sink.name}", daemon=True)
        self._handing.start()

    def disembark(self, failure: str) -> None:
        """The shared query failed: wait for the next one."""
        if self._member is not None:
            self._member.leave(0.0)
            self._member = None
            self.applier.status.state, self.applier.status.error = "failed", failure

    @property
    def _between(self) -> bool:
        """Aboard, or its own query not yet ended."""
        return self._member is not None or (self._handing is not None and self._handing.is_alive())

    def _left(self, member: SharedQuerySink) -> None:
        if member.aboard:
            return
        self._member = None
        if member.error is None:
            _log.info("sink %s is behind the others and goes on alone", self.sink.name)
        else:
            self.runner.failed(member.error)

    def facts(self) -> dict[str, object]:
        """What it last did."""
        said = asdict(self.applier.status)
        reached = format_lsn(self.applier.status.reached)
        more: dict[str, object] = {"shared": self.aboard, **self._tables()}
        if gap := self._gap.gap():
            more["gap"] = gap.facts()
        if losses := self.losses.facts():
            more["losses"] = losses
        return {**said, "reached": reached, "facts": dict(self.applier.facts), **more}

    def _tables(self) -> dict[str, object]:
        """The tables that do not flow, each with its reason."""
        holds = self._holds
        waiting = {str(table): one.facts(self.sink.name, table) for table, one in sorted(holds.waiting.items())}
        skipped = holds.skipped.all().items()
        return {
            "held": _names(holds.paused_now() & self.wishes.paused),
            "tables_waiting": waiting,
            "tables_skipped": _names(holds.skipped_now()),
            "tables_refilling": {str(table): _refilling(table, one) for table, one in skipped if one.refill},
        }

    def _end_refills(self) -> None:
        """Forget the tables that were skipped and have been read again since."""
        refilling = {table: one for table, one in self._holds.skipped.all().items() if one.refill}
        capture = status.read(self._state, "capture") if refilling else {}
        for table, one in refilling.items():
            if one.emptied and one.refilled(table, capture):
                self._holds.skipped.remove(table)

    def _attend(self) -> None:
        """Beside the batches: meet the store while Spark starts, so that an idle sink shows as running, hold and
        release tables, fill lost ones again, and try dead letters again that somebody asked for."""
        while True:
            try:
                self._attended()
            except Stopped:
                return
            except TableLost:
                _log.debug("sink %s: a table was lost while it caught up", self.sink.name)
            except MillraceError as error:
                _log.debug("sink %s: %s", self.sink.name, error)
            except Exception:
                _log.exception("sink %s could not be attended to", self.sink.name)
            if self.stop.wait(_ATTEND):
                return

    def _attended(self) -> None:
        attend(self.applier)
        if self.runner.started:
            self.losses.tend(self.applier)
            self._holds.follow(self.losses.held(self.wishes))
        self._end_refills()


def attend(applier: Applier) -> None:
    """Open a store that was not met yet, look whether it holds what it held, and try letters again."""
    if applier.status.state in ("starting", "refused"):
        applier.greet()
    applier.look()
    applier.retry_letters()


def wishes_of(settings: Settings, sink: SinkSettings, paused: Paused) -> TableRequests:
    """What is asked of a sink's tables. One that left the source is not given to it any more, whatever it names."""
    captured = {table.name for table in settings.source.tables}
    given = frozenset(table for table in settings.tables_of(sink) if not captured or table in captured)
    still = frozenset(table for table in map(TableId.parse, paused.tables) if not given or table in given)
    skipped = frozenset(map(TableId.parse, paused.skipped.get(sink.name, ())))
    return TableRequests(given, still, skipped, paused.resumed)


def _names(tables: Iterable[TableId]) -> list[str]:
    return sorted(map(str, tables))


def _refilling(table: TableId, one: Skipped) -> dict[str, str]:
    message = f"lacks rows of {table}, which was skipped, until backfill {one.refill} has ended"
    return {"message": message, "remedy": f"See: millrace backfill (to ask for it again: millrace backfill {table})"}


@dataclass(slots=True)
class SinkWorkers:
    """Every sink of the pipeline. One thread calls."""

    settings: Settings
    log: LogReader
    spark: Spark
    _lanes: dict[str, SinkWorker] = field(default_factory=dict)
    _ending: dict[str, threading.Thread] = field(default_factory=dict)
    _paused: Paused = field(default_factory=Paused)
    _sharing: SharedQueries = field(init=False)

    def __post_init__(self) -> None:
        self._sharing = SharedQueries(self.log, self.settings.state / "checkpoints")

    def want(self, settings: Settings, paused: Paused) -> None:
        """End what is no longer wanted, or wanted otherwise, and begin what is missing."""
        self.settings, self._paused = settings, paused
        wanted = {sink.name: sink for sink in settings.sinks if sink.name not in paused.sinks}
        for name, lane in list(self._lanes.items()):
            lane.rows.follow(settings.source)
            lane.wishes = wishes_of(settings, lane.sink, paused)
            lane.losses.follow(lane.wishes)
            if wanted.get(name) != lane.sink:
                self._end(name)
        self._ending = {name: thread for name, thread in self._ending.items() if thread.is_alive()}
        for name, sink in wanted.items():
            if name not in self._lanes and name not in self._ending:
                wishes = wishes_of(settings, sink, paused)
                self._lanes[name] = SinkWorker(settings, sink, self.log, self.spark, wishes)

    def tend(self) -> None:
        """Start what is not started, and again what has failed. Without a sink at work there is no Spark either."""
        if not self._lanes:
            return
        waiting = self._sharing.tend(self._lanes, self.spark())
        beginning = any(lane.runner.query.beginning for lane in self._lanes.values())
        for name, lane in self._lanes.items():
            if name not in waiting and not (lane.to_begin and beginning):
                beginning |= lane.to_begin
                lane.tend(self.spark())

    def facts(self) -> Mapping[str, Mapping[str, object]]:
        """By sink."""
        facts = {name: lane.facts() for name, lane in self._lanes.items()}
        for sink in self.settings.sinks:
            if sink.name in self._paused.sinks:
                facts[sink.name] = {"state": "pausing" if sink.name in self._ending else "paused", "held": []}
        return facts

    def close(self) -> None:
        """End all of them; each finishes its batch."""
        for lane in self._lanes.values():
            lane.stop.set()
        ending = [threading.Thread(target=lane.end, daemon=True) for lane in self._lanes.values()]
        for thread in ending:
            thread.start()
        self._sharing.close()
        for thread in (*ending, *self._ending.values()):
            thread.join(2 * GRACE)

    def _end(self, name: str) -> None:
        lane = self._lanes.pop(name)
        _log.info("sink %s stops; its position stays", name)
        self._ending[name] = threading.Thread(target=lane.end, name=f"end-{name}", daemon=True)
        self._ending[name].start()

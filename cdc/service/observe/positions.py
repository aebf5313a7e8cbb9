"""How far each sink is, from the log's consumer positions and capture's watermark."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import cdc.log
from cdc.config.settings import Settings
from cdc.errors import ConfigError, LogLost, MillraceError
from cdc.model import ZERO_LSN, Lsn, TableId, format_lsn, parse_lsn
from cdc.ports import LogReader
from cdc.service.daemon.process import LOG_SECONDS
from cdc.service.observe.dead_letter_counts import DeadLetterCounts
from cdc.service.observe.health import nested
from cdc.service.observe.uncovered import PipelineProgress, Scope
from cdc.service.observe.view_positions import ViewPositions
from cdc.service.state import status
from cdc.service.state.sink_positions import NO_POSITION, SinkPosition, by_name, position_of
from cdc.service.state.store_files import StoreFiles


def open_log(settings: Settings) -> LogReader:
    """The log, for an interactive caller. Raises LogError within seconds if its server does not answer."""
    cdc.log.check_server(settings, LOG_SECONDS)
    return cdc.log.open_reader(settings)


class Positions:
    """Each sink's position. Cheap enough to poll."""

    def __init__(self, settings: Settings, reader: LogReader | None = None) -> None:
        self._state = settings.state
        self._reader = reader or open_log(settings)
        self._sinks = {sink.name: settings.tables_of(sink) for sink in settings.sinks}
        self._dead_letters = DeadLetterCounts(settings.state, self._sinks)
        self.views = ViewPositions(settings.views, settings.state)

    def chosen(self, names: Sequence[str]) -> tuple[str, ...]:
        """These sinks, or all if none is named; raises ConfigError for a name that does not exist."""
        for name in names:
            if name not in self._sinks:
                raise ConfigError(f"No sink is called {name}.", f"Sinks: {', '.join(self._sinks)}.")
        return tuple(names) or tuple(self._sinks)

    def by_sink(self) -> dict[str, SinkPosition]:
        """Each sink's position. 0 until the sink has the whole first snapshot, since an older row may be anywhere in
        it. A lost table counts as held back at 0."""
        consumers, exact = self._reader.consumers(), exact_from(status.read(self._state, "capture"))
        found = {name: position_of(name, tables, consumers) for name, tables in self._sinks.items()}
        if self.views.views:
            known = by_name(consumers)
            self.views.note(consumers, self._reader.head())
            found = {name: replace(one, views=self.views.of_sink(known.get(name))) for name, one in found.items()}
        return {name: self._with_losses(name, _after_snapshot(one, exact)) for name, one in found.items()}

    def _with_losses(self, sink: str, position: SinkPosition) -> SinkPosition:
        lost = {str(table): ZERO_LSN for table in StoreFiles(self._state, sink).losses()}
        return replace(position, held_back={**position.held_back, **lost}) if lost else position

    def reached(self) -> dict[str, Lsn]:
        """The LSN up to which each sink has applied every table, held-back ones included."""
        return {name: position.reached for name, position in self.by_sink().items()}

    def head(self) -> Lsn:
        """The LSN up to which the log is complete."""
        return self._reader.head()[1]

    def behind(self, wanted: Lsn, sinks: Sequence[str] = ()) -> list[str]:
        """Those of these sinks (empty: all) that do not yet hold everything up to an LSN."""
        return self.progress().behind(wanted, Scope(self.chosen(sinks)))

    def progress(self) -> PipelineProgress:
        """How far the pipeline is. Reads capture's watermark first, then the positions, then the head and the dead
        letters: in this order no sink seems further than it is."""
        capture, apply, views = (status.read(self._state, part) for part in ("capture", "apply", "views"))
        positions, head = self.by_sink(), self.head()
        letters = self._dead_letters.read()
        views = views if self.views.views else {}
        return PipelineProgress(capture, apply, positions, head, watermark_of(capture), letters, views)

    def wait_for(self, sink: str, table: TableId, timeout: float, wanted: Lsn) -> None:
        """Return when a sink holds everything of a table up to an LSN; raises MillraceError when out of time."""
        deadline = time.monotonic() + timeout
        scope = Scope(self.chosen([sink]), frozenset({str(table)}))
        while self.progress().behind(wanted, scope):
            if time.monotonic() > deadline:
                raise MillraceError(
                    f"Sink {sink} did not reach {format_lsn(wanted)} in {timeout:g} s with {table}.",
                    "See: millrace status",
                )
            time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class KnownPositions:
    """The log's head and each sink's position. With `trouble` the log did not answer, and they are what capture and
    apply last reported, 0 if they reported nothing."""

    head: Lsn
    positions: Mapping[str, SinkPosition]
    trouble: LogLost | None = None
    views: Mapping[str, Lsn] = field(default_factory=dict)
    """By view: the LSN that its rows in the log reflect."""

    @property
    def reached(self) -> dict[str, Lsn]:
        """By sink, held-back tables included."""
        return {name: position.reached for name, position in self.positions.items()}


def known_positions(settings: Settings) -> KnownPositions:
    """What can be known within seconds, whether or not the log's server answers."""
    try:
        positions = Positions(settings)
        by_sink = positions.by_sink()
        return KnownPositions(positions.head(), by_sink, views=positions.views.reached)
    except LogLost as error:
        return last_reported(settings, error)


def last_reported(settings: Settings, trouble: LogLost) -> KnownPositions:
    """Without the log: what capture and apply last reported."""
    apply = status.read(settings.state, "apply")
    durable = status.read(settings.state, "capture").get("durable")
    reached = {sink.name: nested(apply, "sinks", sink.name).get("reached") for sink in settings.sinks}
    whole = {name: text for name, text in reached.items() if not StoreFiles(settings.state, name).any_loss()}
    positions = {
        name: SinkPosition(parse_lsn(text)) if isinstance(text := whole.get(name), str) else NO_POSITION
        for name in reached
    }
    said = status.read(settings.state, "views")
    lsns = {view.name: nested(said, "views", view.name).get("lsn") for view in settings.views}
    views = {name: parse_lsn(text) if isinstance(text, str) else ZERO_LSN for name, text in lsns.items()}
    return KnownPositions(Lsn(durable) if isinstance(durable, int) else ZERO_LSN, positions, trouble, views)


def exact_from(capture: Mapping[str, object]) -> Lsn | None:
    """The LSN at which, by capture's status, the first snapshot ends; None while it runs, 0 if there is none."""
    exact = capture.get("history_exact_from", "0/0")
    return parse_lsn(exact) if isinstance(exact, str) and exact else None


def watermark_of(capture: Mapping[str, object]) -> Lsn:
    """The LSN up to which capture knows that the log lacks nothing of the source.

    Counts only while that process runs: the source may have been replaced since, with the same LSNs.
    """
    known = capture.get("watermark")
    return Lsn(known) if isinstance(known, int) and not status.gone(capture) else ZERO_LSN


def _after_snapshot(position: SinkPosition, exact: Lsn | None) -> SinkPosition:
    if exact is None or position.applied < exact:
        return replace(position, applied=ZERO_LSN)
    held_back = {table: at if at >= exact else ZERO_LSN for table, at in position.held_back.items()}
    return replace(position, held_back=held_back)

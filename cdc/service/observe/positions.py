"""How far each sink is, from the log's consumer positions and the reader's watermark."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import cdc.log
from cdc.config.settings import Settings
from cdc.errors import ConfigError, LogLost, MillraceError
from cdc.model import ZERO_LSN, Lsn, format_lsn, parse_lsn
from cdc.ports import LogReader
from cdc.service.daemon.process import LOG_SECONDS
from cdc.service.observe.dead_letter_counts import DeadLetterCounts
from cdc.service.observe.health import nested
from cdc.service.observe.uncovered import Asked, Standing
from cdc.service.state import status
from cdc.service.state.sink_positions import NOWHERE, SinkPosition, place_of
from cdc.service.state.store_files import StoreFiles


def open_log(settings: Settings) -> LogReader:
    """The log for somebody who waits in front of it. Raises LogError within seconds if its server does not answer."""
    cdc.log.knock(settings, LOG_SECONDS)
    return cdc.log.open_reader(settings)


class Positions:
    """Each sink's position. Cheap to ask again and again."""

    def __init__(self, settings: Settings, reader: LogReader | None = None) -> None:
        self._state = settings.state
        self._reader = reader or open_log(settings)
        self._sinks = {sink.name: settings.tables_of(sink) for sink in settings.sinks}
        self._letters = DeadLetterCounts(settings.state, self._sinks)

    def known(self, asked: Sequence[str]) -> tuple[str, ...]:
        """The asked sinks, or all; raises ConfigError for a name that does not exist."""
        for name in asked:
            if name not in self._sinks:
                raise ConfigError(f"No sink is called {name}.", f"Sinks: {', '.join(self._sinks)}.")
        return tuple(asked) or tuple(self._sinks)

    def places(self) -> dict[str, SinkPosition]:
        """How far each sink is, and its tables that are held back. 0 until it has the whole first snapshot: older rows
        may be anywhere in it. A table that its store lost is held back from the beginning on."""
        consumers, exact = self._reader.consumers(), exact_from(status.read(self._state, "capture"))
        found = {name: place_of(name, tables, consumers) for name, tables in self._sinks.items()}
        return {name: self._without_losses(name, _since(place, exact)) for name, place in found.items()}

    def _without_losses(self, sink: str, place: SinkPosition) -> SinkPosition:
        lost = {str(table) for table in StoreFiles(self._state, sink).losses()}
        return replace(place, held={**place.held, **dict.fromkeys(lost, ZERO_LSN)}) if lost else place

    def reached(self) -> dict[str, Lsn]:
        """The LSN up to which each sink has applied everything, tables that are held back included."""
        return {name: place.reached for name, place in self.places().items()}

    def head(self) -> Lsn:
        """The LSN up to which the log is complete."""
        return self._reader.head()[1]

    def behind(self, wanted: Lsn, asked: Sequence[str] = ()) -> list[str]:
        """Those of the asked sinks that do not yet hold everything up to an LSN."""
        return self.standing().behind(wanted, Asked(self.known(asked)))

    def standing(self) -> Standing:
        """How far everybody is. The reader's word first, then the stores' positions, then the head and the dead
        letters: in this order no store looks too far."""
        capture, apply = (status.read(self._state, part) for part in ("capture", "apply"))
        places, head = self.places(), self.head()
        return Standing(capture, apply, places, head, watermark_of(capture), self._letters.read())

    def wait_for(self, sink: str, timeout: float, wanted: Lsn) -> None:
        """Return when a sink holds everything up to an LSN; raises MillraceError when out of time."""
        deadline = time.monotonic() + timeout
        while self.behind(wanted, [sink]):
            if time.monotonic() > deadline:
                raise MillraceError(
                    f"Sink {sink} did not reach {format_lsn(wanted)} in {timeout:g} s.", "See: millrace status"
                )
            time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Known:
    """Where the log ends and how far each sink is. With `trouble` the log could not be asked: then it is what the
    parts last said of themselves, and 0 where they said nothing."""

    head: Lsn
    places: Mapping[str, SinkPosition]
    trouble: LogLost | None = None

    @property
    def reached(self) -> dict[str, Lsn]:
        """By sink, tables that are held back included."""
        return {name: place.reached for name, place in self.places.items()}


def known(settings: Settings) -> Known:
    """What can be known within seconds, whether or not the log's server answers."""
    try:
        positions = Positions(settings)
        return Known(positions.head(), positions.places())
    except LogLost as error:
        return last_said(settings, error)


def last_said(settings: Settings, trouble: LogLost) -> Known:
    """Without the log: what the parts last said."""
    apply = status.read(settings.state, "apply")
    durable = status.read(settings.state, "capture").get("durable")
    said = {sink.name: nested(apply, "sinks", sink.name).get("reached") for sink in settings.sinks}
    whole = {name: text for name, text in said.items() if not StoreFiles(settings.state, name).any_loss()}
    places = {
        name: SinkPosition(parse_lsn(text)) if isinstance(text := whole.get(name), str) else NOWHERE for name in said
    }
    return Known(Lsn(durable) if isinstance(durable, int) else ZERO_LSN, places, trouble)


def exact_from(capture: Mapping[str, object]) -> Lsn | None:
    """Where capture says that the log's snapshot ends; None while it has not ended, 0 where nobody takes one."""
    said = capture.get("history_exact_from", "0/0")
    return parse_lsn(said) if isinstance(said, str) and said else None


def watermark_of(capture: Mapping[str, object]) -> Lsn:
    """Up to where the reader knows that the log misses nothing of the source.

    The word of a reader that is gone does not count: the source may be another one since, with the same LSNs.
    """
    known = capture.get("watermark")
    return Lsn(known) if isinstance(known, int) and not status.gone(capture) else ZERO_LSN


def _since(place: SinkPosition, exact: Lsn | None) -> SinkPosition:
    if exact is None or place.flowing < exact:
        return replace(place, flowing=ZERO_LSN)
    return replace(place, held={table: at if at >= exact else ZERO_LSN for table, at in place.held.items()})

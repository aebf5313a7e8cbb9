"""How far each sink is, from the log's consumer positions and the reader's watermark."""

import time
from collections.abc import Sequence

import cdc.log
from cdc.config import Settings
from cdc.errors import ConfigError, MillraceError
from cdc.model import ZERO_LSN, Lsn, format_lsn
from cdc.ports import LogReader
from cdc.service import status
from cdc.service.health import has_reached
from cdc.service.places import held_from


class Positions:
    """Each sink's position. Cheap to ask again and again."""

    def __init__(self, settings: Settings, reader: LogReader | None = None) -> None:
        self._state = settings.state
        self._reader = reader or cdc.log.open_reader(settings)
        self._sinks = tuple(sink.name for sink in settings.sinks)

    def known(self, asked: Sequence[str]) -> tuple[str, ...]:
        """The asked sinks, or all; raises ConfigError for a name that does not exist."""
        for name in asked:
            if name not in self._sinks:
                raise ConfigError(f"No sink is called {name}.", f"Sinks: {', '.join(self._sinks)}.")
        return tuple(asked) or self._sinks

    def reached(self) -> dict[str, Lsn]:
        """The LSN up to which each sink has applied everything, tables that are held back included."""
        consumers = self._reader.consumers()
        applied = {consumer.name: consumer.reached for consumer in consumers}
        return {name: _least(applied.get(name, ZERO_LSN), held_from(name, consumers)) for name in self._sinks}

    def head(self) -> Lsn:
        """The LSN up to which the log is complete."""
        return self._reader.head()[1]

    def behind(self, wanted: Lsn, asked: Sequence[str] = ()) -> list[str]:
        """Those of the asked sinks that do not yet hold everything up to an LSN."""
        watermark = status.read(self._state, "capture").get("watermark")
        known = Lsn(watermark) if isinstance(watermark, int) else ZERO_LSN
        reached, head = self.reached(), self.head()
        return [name for name in self.known(asked) if not has_reached(wanted, reached[name], head, known)]

    def wait_for(self, sink: str, timeout: float, wanted: Lsn) -> None:
        """Return when a sink holds everything up to an LSN; raises MillraceError when out of time."""
        deadline = time.monotonic() + timeout
        while self.behind(wanted, [sink]):
            if time.monotonic() > deadline:
                raise MillraceError(
                    f"Sink {sink} did not reach {format_lsn(wanted)} in {timeout:g} s.", "See: millrace status"
                )
            time.sleep(0.02)


def _least(reached: Lsn, held: Lsn | None) -> Lsn:
    return reached if held is None else min(reached, held)

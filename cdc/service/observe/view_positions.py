"""How far each view is, and how far each sink is with each view.

A view's entries have no LSN of their own: they end where the log ends. So a sink's LSN does not tell which of them it
has applied. Each observation is a fact that does: when a view had reached an LSN, its rows up to there lay before the
head of the log at that moment, and a sink that is past that head has them.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cdc.config.settings import ViewSettings
from cdc.model import ZERO_LSN, Lsn
from cdc.ports import Consumer, Offset
from cdc.service.state.sink_positions import by_name
from cdc.service.views.view_run import consumer_of
from views.dropped import is_dropped

_MOST = 3000
"""Observations in memory: a minute of the fastest polling. A sink that is further behind is behind."""


@dataclass(frozen=True, slots=True)
class _Seen:
    reached: Mapping[str, Lsn]
    offset: Offset
    end: Lsn


@dataclass(slots=True)
class ViewPositions:
    """The views of a pipeline, without dropped ones, observed again and again. For one thread."""

    views: Sequence[ViewSettings]
    state: Path
    _seen: deque[_Seen] = field(default_factory=lambda: deque(maxlen=_MOST))

    def note(self, consumers: Iterable[Consumer], head: tuple[Offset, Lsn]) -> None:
        """Observe; `head` must have been read after `consumers`."""
        known = by_name(consumers)
        running = [view.name for view in self.views if not is_dropped(self.state, view.name)]
        at = {name: known.get(consumer_of(name)) for name in running}
        reached = {name: consumer.reached if consumer else ZERO_LSN for name, consumer in at.items()}
        seen = _Seen(reached, *head)
        if not self._seen or self._seen[-1] != seen:
            self._seen.append(seen)

    @property
    def reached(self) -> Mapping[str, Lsn]:
        """By view: the LSN that its rows in the log reflect."""
        return self._seen[-1].reached if self._seen else {}

    def of_sink(self, sink: Consumer | None) -> Mapping[str, Lsn]:
        """By the view's table: the LSN that the rows which this sink has applied reflect, at least; 0: not known."""
        past = next((seen for seen in reversed(self._seen) if sink is not None and _is_past(sink, seen)), None)
        running = [view for view in self.views if view.name in self.reached]
        return {str(view.table): past.reached.get(view.name, ZERO_LSN) if past else ZERO_LSN for view in running}


def _is_past(sink: Consumer, seen: _Seen) -> bool:
    return sink.reached > seen.end or sink.offset == seen.offset

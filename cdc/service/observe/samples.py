"""The last hour, sampled: what the page plots. Kept in memory; a restart begins anew."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cdc.service.observe.health import nested
from cdc.service.observe.observer import Observation
from cdc.service.observe.page_model import count
from sinks.apply.timings import BOUNDS

_EVERY = 5.0
_KEPT = 720  # an hour


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment; per sink, in the order of `sinks`. `slow` is the time to visible that 99 of 100 changes stayed below
    since the sample before; None where nothing was applied."""

    time: float
    captured: int
    slot_bytes: int
    sinks: tuple[str, ...]
    lag: tuple[int, ...]
    seconds: tuple[float, ...]
    changes: tuple[int, ...]
    slow: tuple[float | None, ...]


class SampleHistory:
    """Takes a sample of what is seen every five seconds."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._counts: dict[str, list[int]] = {}

    def samples(self) -> list[Sample]:
        """Oldest first."""
        return list(self._samples)

    def offer(self, seen: Observation) -> None:
        """Take a sample if it is time for one."""
        if not self._samples or seen.at - self._samples[-1].time >= _EVERY:
            self._samples.append(self._sample(seen))

    def _sample(self, seen: Observation) -> Sample:
        sinks = tuple(seen.reached)
        lags = [seen.sink_lags.get(name) for name in sinks]
        return Sample(
            seen.at,
            count(seen.capture.get("changes_total")),
            count(seen.capture.get("slot_retained_bytes")),
            sinks,
            tuple(lag.bytes if lag else 0 for lag in lags),
            tuple(round(lag.seconds, 1) if lag else 0.0 for lag in lags),
            tuple(sum(map(count, nested(seen.apply, "sinks", name, "changes").values())) for name in sinks),
            tuple(self._slow(seen, name) for name in sinks),
        )

    def _slow(self, seen: Observation, sink: str) -> float | None:
        counts = nested(seen.apply, "sinks", sink, "visible").get("counts")
        if not isinstance(counts, list) or len(counts) != len(BOUNDS) + 1:
            return None
        now = [count(value) for value in counts]
        before = self._counts.get(sink, [0] * len(now))
        self._counts[sink] = now
        fresh = [new - old for new, old in zip(now, before, strict=True)]
        return quantile(now if min(fresh) < 0 else fresh, 0.99)  # a process that was started again counts from 0


def quantile(counts: Sequence[int], share: float) -> float | None:
    """The duration that this share of them stayed below, straight within a bucket; None of nothing."""
    wanted, below, lower = share * sum(counts), 0, 0.0
    if not wanted:
        return None
    for held, upper in zip(counts, (*BOUNDS, BOUNDS[-1]), strict=True):
        if below + held >= wanted:
            return round(lower + (upper - lower) * (wanted - below) / held, 3)
        below, lower = below + held, upper
    return BOUNDS[-1]

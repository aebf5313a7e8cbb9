"""Samples of the last hour, for the page's plots. Kept in memory: a restart loses them."""

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
    """The figures at one time; those of sinks in the order of `sinks`. `slow` is the 99th percentile of the time from
    commit to visible since the previous sample; None if nothing was applied."""

    time: float
    captured: int
    slot_bytes: int
    sinks: tuple[str, ...]
    lag: tuple[int, ...]
    seconds: tuple[float, ...]
    changes: tuple[int, ...]
    slow: tuple[float | None, ...]


class SampleHistory:
    """Keeps a sample every five seconds."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._counts: dict[str, list[int]] = {}

    def samples(self) -> list[Sample]:
        """Oldest first."""
        return list(self._samples)

    def offer(self, seen: Observation) -> None:
        """Keep a sample if five seconds have passed."""
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
        return quantile(now if min(fresh) < 0 else fresh, 0.99)  # a restarted process counts from 0


def quantile(counts: Sequence[int], share: float) -> float | None:
    """The duration that this share of the changes stayed below, interpolated within a bucket; None without changes."""
    wanted, below, lower = share * sum(counts), 0, 0.0
    if not wanted:
        return None
    for number, upper in zip(counts, (*BOUNDS, BOUNDS[-1]), strict=True):
        if below + number >= wanted:
            return round(lower + (upper - lower) * (wanted - below) / number, 3)
        below, lower = below + number, upper
    return BOUNDS[-1]

"""When a part that ended is started again: pure, no clock, no process."""

from dataclasses import dataclass

from cdc import backoff

_FIRST = 0.5
_LONGEST = 30.0
_STEADY = 60.0  # a part that ran this long starts counting afresh: its last trouble is over


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often a part has been started in a row without staying up."""

    failures: int = 0

    def ended(self, ran_for: float) -> "Attempts":
        """The part ended after that many seconds."""
        return Attempts(1 if ran_for >= _STEADY else self.failures + 1)

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start: doubling, bounded."""
        return backoff.delay(self.failures, _FIRST, _LONGEST)


def is_final(code: int) -> bool:
    """Whether an exit code says that starting again cannot help. Signals and unknown codes can."""
    return code in {1, 2, 3}

"""When to restart a process or query that ended. Pure: no clock, no process."""

from dataclasses import dataclass

from cdc import backoff

_FIRST = 0.5
_LONGEST = 30.0
_STEADY = 60.0  # after running this long the count of failures starts anew


@dataclass(frozen=True, slots=True)
class Attempts:
    """How many starts in a row have failed."""

    failures: int = 0

    def ended(self, ran_for: float) -> "Attempts":
        """The count after a run of that many seconds."""
        return Attempts(1 if ran_for >= _STEADY else self.failures + 1)

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start: doubles each time, up to a limit."""
        return backoff.delay(self.failures, _FIRST, _LONGEST)


def is_final(code: int) -> bool:
    """Whether a restart cannot help after this exit code. After a signal or an unknown code it can."""
    return code in {1, 2, 3}

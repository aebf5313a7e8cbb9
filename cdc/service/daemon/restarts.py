"""When to restart a process or query that ended. Pure: no clock, no process."""

from dataclasses import dataclass

from cdc import backoff

_FIRST = 0.5
_LONGEST = 30.0
_STEADY = 20.0
"""After running this long the count of failures starts anew, and the first restart is immediate: a process that was
killed comes back at once. Shorter, and a process that ends soon after its start, which is most of its work, would be
restarted without a pause for ever."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """How many starts in a row have failed: runs of some time do not count."""

    failures: int = 0

    def ended(self, ran_for: float) -> "Attempts":
        """The count after a run of that many seconds."""
        return Attempts(0 if ran_for >= _STEADY else self.failures + 1)

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start: doubles each time, up to a limit."""
        return backoff.delay(self.failures, _FIRST, _LONGEST)


def is_final(code: int) -> bool:
    """Whether a restart cannot help after this exit code. After a signal or an unknown code it can."""
    return code in {1, 2, 3}

"""How long to wait before the next try."""

import random
from collections.abc import Callable


def delay(failures: int, first: float, longest: float) -> float:
    """Seconds after so many failures in a row: `first` after one, doubled by each further one, at most `longest`."""
    return min(longest, first * 2.0 ** min(failures - 1, 60)) if failures > 0 else 0.0


def spread(seconds: float, chance: Callable[[], float] = random.random) -> float:
    """Between half and one and a half times as long, by chance: those that failed together do not return together."""
    return seconds * (0.5 + chance())

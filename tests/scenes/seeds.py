"""Seeds of random histories: a few in CI, hundreds with `make soak-tests`. A seed named in a failure replays it."""

import pytest


def seeds(quick: int, every: int) -> list[object]:
    """The first few as they are, the rest marked soak."""
    return [seed if seed < quick else pytest.param(seed, marks=pytest.mark.soak) for seed in range(every)]

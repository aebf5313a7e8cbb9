"""How a long download or installation reports what it does."""

from collections.abc import Callable

Report = Callable[[str], None]
"""Receives one short line about what is being done."""


def silent(_line: str) -> None:
    """Report nothing."""

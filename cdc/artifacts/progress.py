"""How a long download or installation reports what it does."""

from collections.abc import Callable

Narrate = Callable[[str], None]
"""Receives one short line for a person who waits."""


def silent(_line: str) -> None:
    """Report nothing."""

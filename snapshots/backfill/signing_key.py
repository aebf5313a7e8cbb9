"""The key that signs backfill requests; readable by those who may read the state folder."""

import contextlib
import secrets
from pathlib import Path

from cdc.durable_files import create
from cdc.errors import ConfigError


def control_key(state: Path, create: bool = False) -> bytes:
    """The pipeline's key, created if it is missing and `create` is set. Raises ConfigError if it cannot be read."""
    place = state / "control.key"
    if create:
        _make(place)
    try:
        return place.read_bytes()
    except OSError:
        raise ConfigError(
            f"{place} cannot be read: this pipeline has not run yet, or belongs to another user.",
            "Start it with: millrace run",
        ) from None


def _make(place: Path) -> None:
    """Whole or not at all: a crash must not leave an empty key, with which everybody could sign."""
    if place.exists():
        return
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        create(place, secrets.token_hex(32).encode())

"""The key that signs requests, shared by those who may read the state folder."""

import contextlib
import os
import secrets
from pathlib import Path

from cdc.errors import ConfigError


def control_key(state: Path, create: bool = False) -> bytes:
    """The pipeline's key; made where it is missing and `create` is set. Raises ConfigError where it cannot be read."""
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
    aside = place.with_name(f".control.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(aside, place)
    aside.unlink()

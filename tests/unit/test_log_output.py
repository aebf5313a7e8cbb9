"""No secret, no forged line."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from cdc import log_output
from cdc.config.secret import Secret


@pytest.fixture
def spoken() -> Iterator[io.StringIO]:
    """What a process logs, as JSON."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    log_output.configure("capture", "json", "DEBUG", [Secret("correct-horse"), Secret("x")], stream)
    yield stream
    root.handlers[:], root.level = before


@pytest.mark.parametrize(
    "message",
    [
        "connecting with correct-horse",
        "postgresql://millrace:correct-horse@db/shop",
        "host=db password=correct-horse port=5",
        "password = 'another horse'",
        "Authorization: Bearer another-horse",
        "redis://:another-horse@cache:6379",
    ],
)
def test_a_secret_never_reaches_a_line(spoken: io.StringIO, message: str) -> None:
    logging.getLogger("test").info(message)
    assert "horse" not in spoken.getvalue()


def test_a_very_short_secret_does_not_shred_the_text(spoken: io.StringIO) -> None:
    logging.getLogger("test").info("exact text")
    assert json.loads(spoken.getvalue())["message"] == "exact text"


def test_an_exception_is_redacted_too(spoken: io.StringIO) -> None:
    try:
        raise RuntimeError("password=correct-horse")
    except RuntimeError:
        logging.getLogger("test").exception("failed")
    assert "RuntimeError" in spoken.getvalue()
    assert "horse" not in spoken.getvalue()


def test_a_name_with_control_characters_cannot_forge_a_line_or_a_colour(spoken: io.StringIO) -> None:
    logging.getLogger("test").info("table %s", 'a"\r\x1b[31mb')
    assert len(spoken.getvalue().splitlines()) == 1
    assert json.loads(spoken.getvalue())["message"] == 'table a"\\x0d\\x1b[31mb'

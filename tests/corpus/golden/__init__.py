"""What Debezium 3.6.2 made of some statements, kept for ever: `debezium.jsonl`, one message a line.

`value` comes from a connector with decimal.handling.mode=string and binary.handling.mode=base64, `iso` from one with
time.precision.mode=isostring; `setup.sql` and `statements.json` are what both saw.
"""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


def setup() -> str:
    """The tables, and rows that were there before the connectors."""
    return (_FOLDER / "setup.sql").read_text()


def statements() -> list[tuple[str, list[str]]]:
    """A label and the statements of one transaction, in order."""
    return [(label, list(parts)) for label, parts in json.loads((_FOLDER / "statements.json").read_text())]


def messages() -> list[dict[str, Any]]:
    """Every message, numbers with all their digits."""
    lines = (_FOLDER / "debezium.jsonl").read_text().splitlines()
    return [json.loads(line, parse_float=Decimal) for line in lines]

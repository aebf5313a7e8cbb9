"""Documents in a range of keys: a query that finds all of them and perhaps more, and their keys for the exact test."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from cdc.json_text.members import members, unquote
from cdc.key_range import KeyRange, Level
from sinks.opensearch.client import Client, path_of

_COMPARABLE = {"time": {"date"}, "number": {"short", "integer", "long"}, "word": set[str]()}
"""Field types that sort as the key does. Values that they do not index (infinity, BC) are outside every range."""
_UNSAFE = frozenset(".*,")


def filters(client: Client, index: str, wanted: KeyRange) -> list[dict[str, Any]]:
    """Conditions that every document of the range meets; they only reduce what is fetched. Bounds are tested later."""
    conditions: list[dict[str, Any]] = []
    for level in wanted.levels:
        column = level.columns[0]
        if _bounded(level) and _field(client, index, column) in _COMPARABLE[level.kinds[0]]:
            conditions.append({"range": {column: {"gte": level.lower[0], "lte": level.upper[0]}}})
    return conditions


def _bounded(level: Level) -> bool:
    """Whether the first column has two bounds that a field can be compared to."""
    bounds = (*level.lower[:1], *level.upper[:1])
    whole = all(isinstance(bound, str) and (level.kinds[0] == "time" or "." not in bound) for bound in bounds)
    return bool(bounds) and whole and not _UNSAFE.intersection(level.columns[0])


def _field(client: Client, index: str, column: str) -> str:
    """The type of a column's field in the index, which may be older than the settings."""
    fields: dict[str, dict[str, Any]] = {}
    for found in client.json("GET", path_of(index, "_mapping")).values():
        fields = found["mappings"].get("properties", {})
    return str(fields.get(column, {}).get("type", ""))


def source_of(wanted: KeyRange) -> bool | list[str]:
    """Which fields to fetch. OpenSearch prints a part of a document anew and would round a long number: then all."""
    numbers = any(kind == "number" for level in wanted.levels for kind in level.kinds)
    return True if numbers or any(_UNSAFE.intersection(name) for name in wanted.columns) else wanted.columns


def texts(sources: Sequence[str], names: Sequence[str]) -> Mapping[str, pa.StringArray]:
    """The columns of these documents as texts."""
    rows = [members(source) for source in sources]
    return {name: pa.array([_text(row.get(name, "null")) for row in rows], pa.string()) for name in names}


def _text(raw: str) -> str | None:
    return None if raw == "null" else unquote(raw)

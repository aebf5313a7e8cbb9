"""A bench for each kind of sink: what the contract suite needs beyond the sink itself.

To put a new kind under the suite, write its bench and add one line to BENCHES.
"""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from cdc.model import TableSchema
from cdc.ports import Sink
from sinks import memory
from sinks.context import SinkContext


class Bench(Protocol):
    """One empty store for one test."""

    def open(self) -> Sink:
        """A new sink on the store: what a restart of ours does. The old one may not have been closed."""

    def restart(self) -> None:
        """Stop and start the store, keeping its data. Nothing to do for a store without a server."""

    def versions(self, schema: TableSchema) -> dict[str, int]:
        """Every key that the store remembers, deleted ones too, with the version it holds."""

    def lose(self, schema: TableSchema, key: str) -> None:
        """Take a row away behind the sink's back, as an eviction or a rebuilt index would."""


class MemoryBench:
    """The in-process store."""

    def __init__(self) -> None:
        self._settings = memory.MemorySettings(name=f"memory-{uuid.uuid4().hex[:8]}")
        self._context = SinkContext(Path("unused"))

    def open(self) -> Sink:
        return memory.open_sink(self._settings, self._context)

    def restart(self) -> None:
        """It lives in this process."""

    def versions(self, schema: TableSchema) -> dict[str, int]:
        rows = memory._STORES[self._settings.name][str(schema.table)].rows
        return {key: row.version for key, row in rows.items()}

    def lose(self, schema: TableSchema, key: str) -> None:
        del memory._STORES[self._settings.name][str(schema.table)].rows[key]


MakeBench = Callable[[pytest.FixtureRequest], Bench]

BENCHES: dict[str, MakeBench] = {
    "memory": lambda request: MemoryBench(),
}

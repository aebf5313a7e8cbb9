"""A folder of Delta tables: `lake` is where, `open_lake` opens the sink on it."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs

from cdc.model import TableSchema
from cdc.ports import Batch, Sink
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.deletion_vectors import new_files, writer
from sinks.delta.settings import DeltaSettings
from tests.scenes.histories import INTEGERS, History, batch, change, cut, images


class OpenLake(Protocol):
    """Opens the sink with these settings and prepares these tables."""

    def __call__(self, *schemas: TableSchema, **settings: Any) -> delta.DeltaSink: ...


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def open_lake(lake: Path) -> OpenLake:
    """As often as a test restarts the writer."""

    def opened(*schemas: TableSchema, **settings: Any) -> delta.DeltaSink:
        sink = delta.open_sink(DeltaSettings(path=str(lake), **settings), SinkContext(lake))
        for schema in schemas:
            sink.prepare(schema)
        return sink

    return opened


def stored_table(lake: Path, name: str = "public.items") -> DeltaTable:
    """As any other reader of Delta opens it."""
    return DeltaTable(lake / name)


def mark_everywhere(patch: pytest.MonkeyPatch, small_files: int | None = None) -> None:
    """Old rows are marked by deletion vectors also in small tables, as those of large ones are."""
    patch.setattr(writer, "LEAST_REGION", 0)
    patch.setattr(writer, "LEAST_RATIO", 0)
    if small_files is not None:
        patch.setattr(new_files, "SMALL_FILES", small_files)


def numbers(schema: TableSchema, ids: range, version: int, label: str = "row", **more: str) -> Batch:
    """A row for each number with its label; `more` are other columns, each holding its text and the number."""

    def written(number: int) -> str:
        texts = {"label": label, **more}
        return ",".join([f'"id":{number}', *(f'"{name}":"{text} {number}"' for name, text in texts.items())])

    return batch(schema, [change("u", f'{{"id":{number}}}', version, f"{{{written(number)}}}") for number in ids])


def apply_with_repeats(sink: Sink, batches: Sequence[Batch], rng: random.Random) -> None:
    """Each followed by one that came before."""
    for number, current in enumerate(batches):
        sink.apply(current)
        sink.apply(batches[rng.randrange(number + 1)])


def ends_as_the_source(
    sink: Sink, schema: TableSchema, rng: random.Random, keys: list[dict[str, str]] = INTEGERS, length: int = 60
) -> None:
    """After a random history in batches, with repeats."""
    history = History(schema, keys, rng).write(length)
    apply_with_repeats(sink, [batch(schema, rows) for rows in cut(history.rows, rng)], rng)
    assert sink.stored(schema).equals(sink.expected(schema, images(history.state())))


def remove_prefix(uri: str, options: dict[str, str]) -> None:
    """Take everything below a prefix of a bucket away, as another program would."""
    files = fs.PyFileSystem(DeltaStorageHandler(uri, options))
    for one in files.get_file_info(fs.FileSelector("", recursive=True)):
        if one.is_file:
            files.delete_file(one.path)

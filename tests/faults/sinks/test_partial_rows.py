"""Partial rows keep large columns of the stored ones: those are read back in pieces by bytes, whatever a batch holds.

A change that leaves a large column out is small itself, so fifty thousand of them fit into one batch, and what they
keep would not fit into memory. What is measured is the most that is held at once.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc.config.settings import RetrySettings
from cdc.model import Lsn, TableSchema
from cdc.ports import Batch, Sink
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetter, DeadLetters
from sinks.context import SinkContext
from sinks.delta.settings import DeltaSettings
from sinks.delta.sink import DeltaSink
from sinks.delta.write import writer
from sinks.fold.folded import Folded
from sinks.memory import MemorySink
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.sink import OpenSearchSink
from sinks.opensearch.sink import open_sink as open_opensearch
from sinks.redis.row_formats import StoredValue
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import RedisSink
from sinks.redis.sink import open_sink as open_redis
from sinks.rows import read_sizes
from tests.contract.test_sinks import check
from tests.corpus.registry import Registry
from tests.fix_delta import mark_everywhere
from tests.fix_servers import LocalServer
from tests.scenes.histories import batch, change, table

ITEMS = table()
END = Lsn(30)
LARGE, ROWS, BOUND = 50_000, 200, 500_000
"""Ten megabytes are kept, of which half of one may be held at once."""


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_sizes, "PIECE_BYTES", BOUND)


def full(label: str = "old") -> dict[str, str]:
    """Images by key."""
    return {f'{{"id":{key}}}': f'{{"id":{key},"label":"{label}","big":"{_large(key)}"}}' for key in range(ROWS)}


def _large(key: int) -> str:
    return f"{key:06d}" * (LARGE // 6)


def whole(version: int) -> Batch:
    return batch(ITEMS, [change("c", key, version, image) for key, image in full().items()])


def partial(version: int) -> Batch:
    rows = [change("u", key, version, f'{key[:-1]},"label":"new"}}', ["big"]) for key in full()]
    return batch(ITEMS, rows)


def filled(sink: Sink) -> None:
    """Write the large rows, then change all of them without their large column."""
    sink.prepare(ITEMS)
    sink.apply(whole(10))
    sink.apply(partial(20))
    check(sink, full("new"))


@pytest.mark.parametrize("form", ["json", "hash"])
def test_redis_reads_stored_rows_in_pieces_by_bytes(redis_url: str, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    sink = open_redis(RedisSettings(url=redis_url, form=form), SinkContext(Path("unused")))
    assert isinstance(sink, RedisSink)
    read, most = sink._read, 0

    def watched(*args: Any) -> list[tuple[bytes, StoredValue]]:
        nonlocal most
        found = read(*args)
        most = max(most, sum(_size(held) for _, held in found))
        return found

    monkeypatch.setattr(sink, "_read", watched)
    filled(sink)
    assert LARGE < most <= BOUND


def _size(held: StoredValue) -> int:
    return sum(map(len, held.values())) if isinstance(held, Mapping) else len(held or b"")


@pytest.mark.parametrize("routing", [{}, {"public.items": "label"}])
def test_opensearch_reads_and_writes_stored_rows_in_pieces_by_bytes(
    opensearch_server: LocalServer, index_prefix: str, monkeypatch: pytest.MonkeyPatch, routing: dict[str, str]
) -> None:
    own = {"url": opensearch_server.url, "prefix": index_prefix, "replicas": 0, "shards": 2, "routing": routing}
    sink = open_opensearch(OpenSearchSettings(**own), SinkContext(Path("unused")))
    assert isinstance(sink, OpenSearchSink)
    asked, sent = sink._client.text, sink._bulk.send
    read, written = list[int](), list[int]()

    def watched(method: str, path: str, body: object = None, **params: str) -> str:
        answer = asked(method, path, body, **params)
        if path.endswith("_mget"):
            read.append(len(answer))
        return answer

    def counted(alias: str, items: Sequence[Any]) -> Any:
        written.append(sum(len(one.body) for one in items))
        return sent(alias, items)

    sink.prepare(ITEMS)
    sink.apply(whole(10))
    monkeypatch.setattr(sink._client, "text", watched)
    monkeypatch.setattr(sink._bulk, "send", counted)
    sink.apply(partial(20))
    monkeypatch.undo()
    check(sink, full("new"))
    first = 16 * (LARGE + 1000)  # before anything is known of their size
    assert LARGE < max(read) <= first and LARGE < max(written) <= first
    assert sorted(read)[-2] <= BOUND * 1.2, "what the first piece weighed decides how many follow"


@pytest.mark.parametrize("marked", [False, True])
def test_delta_fills_partial_rows_in_pieces_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    monkeypatch.setattr(writer, "PARTIAL_BYTES", BOUND)
    monkeypatch.setattr(writer, "LEAST_FILE", 1000)
    if marked:
        mark_everywhere(monkeypatch)
    most = 0

    def watched(fill: Callable[..., Any]) -> Callable[..., Any]:
        def filled(stored: pa.Table, *more: Any) -> Any:
            nonlocal most
            most = max(most, int(stored.nbytes))
            return fill(stored, *more)

        return filled

    for place in ("sinks.delta.write.writer.rewrite", "sinks.delta.deletion_vectors.writer.new_rows"):
        module, name = place.rsplit(".", 1)
        monkeypatch.setattr(place, watched(getattr(__import__(module, fromlist=[name]), name)))
    monkeypatch.setattr(writer, "INFLATED_LIMIT", 4 * BOUND)  # files of a tenth of that are rewritten as a whole
    sink = DeltaSink(DeltaSettings(path=str(tmp_path / "lake")), SinkContext(tmp_path))
    sink.prepare(ITEMS)
    for key in range(0, ROWS, 10):
        sink.apply(Batch(ITEMS, whole(10).rows.slice(key, 10)))
    sink.apply(partial(20))
    check(sink, full("new"))
    assert LARGE < most <= (2 if marked else 5) * BOUND


class Rejecting(MemorySink):
    """Holds nothing, and so refuses every partial row; notes the largest batch."""

    most = 0

    def apply(self, batch: Batch) -> None:
        self.most = max(self.most, int(batch.rows.nbytes))
        super().apply(batch)


class Log:
    """As much of a log as an applier needs here."""

    def __init__(self) -> None:
        self.schemas = Registry()
        self.schemas.record(ITEMS)

    def commit(self, *_: object) -> None:
        """Nothing to keep."""


def applier(sink: MemorySink, tmp_path: Path, **more: Any) -> Applier:
    return Applier(
        "memory",
        open_sink=lambda: sink,
        log=Log(),  # type: ignore[arg-type]
        letters=DeadLetters(tmp_path / "letters"),
        stop=threading.Event(),
        retry=RetrySettings(),
        **more,
    )


def test_rows_are_read_again_from_the_source_in_pieces_by_bytes(tmp_path: Path) -> None:
    asked: list[int] = []

    def reselect(_: TableSchema, keys: Sequence[str]) -> Mapping[str, str]:
        asked.append(len(keys))
        return {key: full("new")[key] for key in keys}

    sink = Rejecting("memory", {})
    applier(sink, tmp_path, reselect=reselect).apply(Folded(END, None, [partial(20)]))
    check(sink, full("new"))
    assert sum(asked) == ROWS and asked[0] == 16 and max(asked[1:]) * LARGE <= BOUND
    assert sink.most <= 17 * LARGE


def test_dead_letters_are_read_in_pieces_by_bytes_and_only_those_of_the_batch(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    letters = [
        DeadLetter("public.items", key, "c", image, (), 10, 10, now, 1, "poison", now) for key, image in full().items()
    ]
    DeadLetters(tmp_path / "letters").add(letters)
    sink = Rejecting("memory", {})
    made = applier(sink, tmp_path)
    made.apply(Folded(END, None, [Batch(ITEMS, partial(20).rows.slice(0, ROWS // 2))]))
    assert sink.most <= BOUND * 1.1
    assert made.status.dead_letters == ROWS // 2
    DeadLetters(tmp_path / "letters").ask_retry()
    assert made.retry_dead_letters() == 0
    assert sink.most <= BOUND * 1.1
    check(sink, full("new") | dict(list(full().items())[ROWS // 2 :]))

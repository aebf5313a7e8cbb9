"""A full disk at every single step of the log: it is said, a retry meets no leftovers, and room lets it go on."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.errors import LogFull
from cdc.log.kafka.write.spool import KafkaSpool
from cdc.log.segments.log import SegmentSettings
from cdc.log.segments.schemas import FolderSchemas
from cdc.model import LOG_SCHEMA, Lsn, TableId, TableSchema
from cdc.service.state import status
from tests.contract.logs import entry, history, read_all
from tests.faults.log.test_segments import leftovers
from tests.scenes.segment_logs import folder_reader, folder_writer

SETTINGS = SegmentSettings(hot_segments=2, retention_hours=1e6)
CALLS = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir")


class Disk:
    """Counts every call that may need room; from one of them on there is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls = 0
        self._full_from = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._limited(name, getattr(os, name)))

    @contextmanager
    def full_from(self, call: int) -> Iterator[None]:
        self._calls, self._full_from = 0, call
        try:
            yield
        finally:
            self._full_from = 0

    def _limited(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def limited(*args: object, **options: object) -> object:
            makes = name != "open" or (isinstance(args[1], int) and args[1] & os.O_CREAT)
            if self._full_from and makes:
                self._calls += 1
                if self._calls >= self._full_from:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **options)

        return limited


@dataclass(frozen=True, slots=True)
class Step:
    """Something that needs room: done by `act`, which may be called again; `holds` asserts that it was done once."""

    act: Callable[[], object]
    holds: Callable[[], None]


def an_append(root: Path) -> Step:
    writer = folder_writer(root, SETTINGS)
    writer.append(entry(1))

    def holds() -> None:
        assert writer.progress().end == 210 and writer.progress().marks == {"mark": "new"}
        writer.append(entry(3))
        writer.close()
        assert read_all(folder_reader(root)).equals(history(1, 2, 3))
        again = folder_writer(root, SETTINGS)
        assert again.progress().end == 310 and again.progress().marks == {"mark": "new"}
        again.close()

    return Step(lambda: writer.append(entry(2, marks={"mark": "new"})), holds)


def a_spool(root: Path) -> Step:
    writer = folder_writer(root, SETTINGS)
    spool = writer.spool()
    spool.write(entry(1).rows)

    def holds() -> None:
        writer.append(entry(2))
        writer.close()
        assert read_all(folder_reader(root)).equals(history(1, 2))

    return Step(lambda: spool.publish(entry(1).end), holds)


def a_merge(root: Path) -> Step:
    writer = folder_writer(root, SETTINGS)
    for number in range(1, 10):
        writer.append(entry(number))

    def holds() -> None:
        assert len(folder_reader(root).view().chain.kept) < 9
        assert folder_reader(root).view().chain.superseded == ()
        writer.close()
        assert read_all(folder_reader(root)).equals(history(*range(1, 10)))

    return Step(writer.maintain, holds)


def a_schema(root: Path) -> Step:
    schemas, table = FolderSchemas(root / "schemas"), TableSchema(TableId("public", "items"), ())

    def record() -> TableSchema:
        return schemas.record(table)

    def holds() -> None:
        assert record().id == 1
        assert FolderSchemas(root / "schemas").get(table.table, 1).columns == table.columns

    return Step(record, holds)


def a_position(root: Path) -> Step:
    writer = folder_writer(root, SETTINGS)
    writer.append(entry(1))
    reader = folder_reader(root)

    def holds() -> None:
        writer.close()
        assert [consumer.reached for consumer in reader.consumers()] == [110]
        assert not [path for path in (root / "consumers").iterdir() if path.name.startswith(".")]

    return Step(lambda: reader.commit("sink", Lsn(110)), holds)


STEPS: dict[str, Callable[[Path], Step]] = {
    "append": an_append,
    "spool": a_spool,
    "merge": a_merge,
    "schema": a_schema,
    "position": a_position,
}


@pytest.mark.parametrize("name", sorted(STEPS))
def test_no_room_at_any_call_is_waited_for_and_leaves_nothing_that_a_retry_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    disk = Disk(monkeypatch)
    for call in range(1, 50):
        root = tmp_path / str(call)
        root.mkdir()
        step = STEPS[name](root)
        with disk.full_from(call):
            try:
                step.act()
            except LogFull as error:
                assert "room" in str(error)
            else:
                break
        with disk.full_from(1), suppress(LogFull):
            step.act()
        step.act()
        assert leftovers(root) == [], f"after call {call}"
        step.holds()
    assert 3 < call < 49, "each of its calls has failed once"


def test_a_status_that_finds_no_room_leaves_the_one_before_and_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status.publish(tmp_path, "capture", {"state": "before"})
    disk = Disk(monkeypatch)
    with disk.full_from(3), pytest.raises(OSError, match="No space"):
        status.publish(tmp_path, "capture", {"state": "after"})
    assert status.read(tmp_path, "capture")["state"] == "before"
    assert [path.name for path in status.folder(tmp_path).iterdir()] == ["capture.json"]
    status.publish(tmp_path, "capture", {"state": "after"})
    assert status.read(tmp_path, "capture")["state"] == "after"


def test_a_spool_for_kafka_goes_on_where_the_disk_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[object] = []

    def publish(tables: Iterable[pa.Table], _end: Lsn) -> None:
        if not published:
            published.append("full")
            raise LogFull("Kafka cannot store more.", "Make room on the brokers.")
        published.append(list(tables))

    disk = Disk(monkeypatch)
    spool = KafkaSpool(publish, tmp_path)
    spool.write(entry(1).rows)
    with disk.full_from(1), pytest.raises(LogFull, match="No disk space"):
        spool.write(entry(2).rows)
    spool.write(entry(2).rows)
    with pytest.raises(LogFull, match="Kafka"):
        spool.publish(Lsn(210))
    spool.publish(Lsn(210))
    found = published[1]
    assert isinstance(found, list)
    assert [table.select(LOG_SCHEMA.names).equals(entry(at).rows) for at, table in enumerate(found, 1)] == [True, True]
    assert list(tmp_path.iterdir()) == []

"""What can go wrong under the segment log: no room, foreign bytes, lost files, crashes of a merge, zombies."""

import os
import pickle
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc.errors import EnvironmentFault, LogCorrupt, LogFenced, LogFull
from cdc.log.segments import segment_file
from cdc.log.segments.folder.writer import FolderWriter
from cdc.log.segments.log import SegmentSettings, SegmentWriter
from cdc.log.segments.quarantine import quarantine
from cdc.log.segments.segment_file import Encoding
from cdc.log.segments.segment_names import SequenceGap
from cdc.model import Entry, Lsn
from tests.contract.logs import commits, entry, history, read_all, rows
from tests.fix_processes import RunProgram, wait_until
from tests.fix_servers import MakeDisk, fill
from tests.scenes.segment_logs import folder_reader, folder_writer

SETTINGS = SegmentSettings(hot_segments=2, retention_hours=1e6)
MERGE_POINTS = ("log.merge_before_publish", "log.merge_after_publish", "log.merge_removing")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def writer(root: Path) -> Iterator[SegmentWriter]:
    opened = folder_writer(root, SETTINGS)
    yield opened
    opened.close()


def hot(root: Path) -> list[Path]:
    return sorted((root / "hot").iterdir())


def leftovers(root: Path) -> list[str]:
    return [path.name for folder in root.glob(".*") for path in folder.rglob("*")]


# No room


@pytest.fixture
def tiny_disk(small_disk: MakeDisk) -> Path:
    """A real file system of one megabyte."""
    return small_disk(1)


def test_a_full_disk_says_so_shows_nothing_and_goes_on_when_there_is_room(tiny_disk: Path) -> None:
    writer = folder_writer(tiny_disk / "log", SETTINGS)
    reader = folder_reader(tiny_disk / "log")
    writer.append(entry(1))
    ballast = fill(tiny_disk)
    for _ in range(3):
        with pytest.raises(LogFull, match="No room left"):
            writer.append(entry(2))
    assert commits(read_all(reader)) == [100] * 3
    assert writer.progress().end == 110
    ballast.unlink()
    writer.append(entry(2))
    assert read_all(reader).equals(history(1, 2))
    assert leftovers(tiny_disk / "log") == []
    writer.close()


def test_a_writer_that_starts_on_a_full_disk_says_so_and_starts_later(tiny_disk: Path) -> None:
    writer = folder_writer(tiny_disk / "log", SETTINGS)
    writer.append(entry(1))
    writer.close()
    ballast = fill(tiny_disk)
    with pytest.raises(LogFull):
        folder_writer(tiny_disk / "log", SETTINGS).append(entry(2))
    ballast.unlink()
    again = folder_writer(tiny_disk / "log", SETTINGS, takeover=True)
    again.append(entry(2))
    assert read_all(folder_reader(tiny_disk / "log")).equals(history(1, 2))
    again.close()


def test_a_spool_meets_a_full_disk_and_goes_on_when_there_is_room(tiny_disk: Path) -> None:
    writer = folder_writer(tiny_disk / "log", SETTINGS)
    spool = writer.spool()
    spool.write(entry(1).rows)
    ballast = fill(tiny_disk)
    with pytest.raises(LogFull):
        spool.publish(entry(1).end)
    ballast.unlink()
    spool.publish(entry(1).end)
    assert read_all(folder_reader(tiny_disk / "log")).equals(history(1))
    writer.close()


def test_a_merge_without_room_leaves_everything_as_it_was(tiny_disk: Path) -> None:
    writer = folder_writer(tiny_disk / "log", SETTINGS)
    for number in range(1, 10):
        writer.append(entry(number))
    ballast = fill(tiny_disk)
    with pytest.raises(LogFull):
        writer.maintain()
    assert read_all(folder_reader(tiny_disk / "log")).equals(history(*range(1, 10)))
    ballast.unlink()
    writer.maintain()
    assert read_all(folder_reader(tiny_disk / "log")).equals(history(*range(1, 10)))
    writer.close()


def test_a_file_size_limit_is_no_room_too(writer: SegmentWriter, root: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        with pytest.raises(LogFull):
            writer.append(entry(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.append(entry(1))
    assert read_all(folder_reader(root)).equals(history(1))


# Foreign and damaged bytes


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def foreign_parquet(path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), path)


def fewer_rows(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path, store_schema=False)


def planted_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
    "wrong magic": lambda path: path.write_bytes(b"XXXX" + path.read_bytes()[4:-4] + b"XXXX"),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"evil": os.system})),
    "a flipped bit": flip_a_bit,
    "another table": foreign_parquet,
    "fewer rows than promised": fewer_rows,
    "a symbolic link": planted_link,
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_bad_bytes_are_an_error_that_names_the_file(writer: SegmentWriter, root: Path, damage: str) -> None:
    for number in (1, 2, 3):
        writer.append(entry(number))
    bad = hot(root)[1]
    DAMAGES[damage](bad)
    reader = folder_reader(root)
    seen: list[int] = []
    with pytest.raises(LogCorrupt) as caught:
        seen.extend(piece.end for piece in reader.read(reader.start()))
    assert bad.name in str(caught.value)
    assert "n2@" not in str(caught.value), "no row values in messages"
    assert seen == [110], "what lies before it is read, nothing behind it"


def test_a_segment_that_claims_to_inflate_beyond_every_bound_is_refused_unread(
    writer: SegmentWriter, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = pa.array(["0" * (64 << 20)])
    plain = entry(1).rows.slice(0, 1)
    writer.append(Entry(plain.set_column(plain.column_names.index("after"), "after", bomb), Lsn(110)))
    assert hot(root)[0].stat().st_size < 1 << 20, "sixty-four megabytes in less than one"
    monkeypatch.setattr(segment_file, "_MAX_GROUP_BYTES", 32 << 20)
    reader = folder_reader(root)
    before = pa.total_allocated_bytes()
    with pytest.raises(LogCorrupt, match="claims a row group larger"):
        list(reader.read(reader.start()))
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_quarantined_segment_lets_the_rest_be_read(writer: SegmentWriter, root: Path) -> None:
    for number in (1, 2, 3):
        writer.append(entry(number, marks={str(number): "x"}))
    writer.close()
    bad = hot(root)[1]
    bad.write_bytes(b"garbage")
    with pytest.raises(LogCorrupt):
        folder_writer(root, SETTINGS)
    with closing(FolderWriter(root, Encoding())) as storage:
        assert quarantine(storage, 2).start == 2
    assert read_all(folder_reader(root)).equals(history(1, 3))
    assert [path.read_bytes() for path in (root / "quarantine").iterdir()] == [b"garbage"]
    again = folder_writer(root, SETTINGS)
    assert again.progress().end == 310
    assert set(again.progress().marks) == {"1", "3"}
    again.close()


def test_a_stranger_in_the_folder_is_never_read_but_reported(writer: SegmentWriter, root: Path) -> None:
    writer.append(entry(1))
    (root / "hot" / "notes.parquet").write_bytes(b"not ours")
    reader = folder_reader(root)
    assert read_all(reader).equals(history(1))
    assert reader.view().foreign_files == ("hot/notes.parquet",)


def test_a_lost_segment_is_an_error_and_never_skipped(writer: SegmentWriter, root: Path) -> None:
    for number in (1, 2, 3):
        writer.append(entry(number))
    writer.close()
    hot(root)[1].unlink()
    with pytest.raises(SequenceGap, match="sequence numbers 2 to 2 are missing"):
        read_all(folder_reader(root))
    with pytest.raises(SequenceGap):
        folder_writer(root, SETTINGS)


def test_an_offset_beyond_the_end_is_an_error_and_not_an_empty_read(writer: SegmentWriter, root: Path) -> None:
    writer.append(entry(1))
    reader = folder_reader(root)
    head, _ = reader.head()
    shutil.rmtree(root / "hot")
    with pytest.raises(LogCorrupt, match="beyond the end of the log"):
        list(reader.read(head))


# Permissions


def test_everything_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        writer = folder_writer(tmp_path / "log", SETTINGS)
        for number in range(1, 8):
            writer.append(entry(number))
        spool = writer.spool()
        spool.write(rows(900, 1))
        spool.publish(Lsn(910))
        folder_reader(tmp_path / "log").commit("sink", Lsn(110))
        writer.maintain()
        writer.close()
    finally:
        os.umask(before)
    for path in (tmp_path / "log").rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_log_folder_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "log").symlink_to(tmp_path / "real")
    with pytest.raises(EnvironmentFault, match="symbolic link"):
        folder_writer(tmp_path / "log", SETTINGS)


# Crashes of a merge


@pytest.mark.parametrize("point", MERGE_POINTS)
def test_a_merge_killed_anywhere_is_harmless(root: Path, run_program: RunProgram, point: str) -> None:
    writer = folder_writer(root, SETTINGS)
    for number in range(1, 9):
        writer.append(entry(number, marks={str(number): "x"}))
    writer.close()
    child = run_program(
        "-m", "tests.faults.log.log_child", str(root), "maintain", env={"MILLRACE_FAIL": f"{point}:kill"}
    )
    assert child.wait() == -signal.SIGKILL, child.said()
    assert read_all(folder_reader(root)).equals(history(*range(1, 9)))
    again = folder_writer(root, SETTINGS)
    again.maintain()
    assert len(again.progress().marks) == 8
    assert read_all(folder_reader(root)).equals(history(*range(1, 9)))
    assert folder_reader(root).view().chain.superseded == ()
    assert leftovers(root) == []
    again.close()


# Zombies


def test_a_stopped_writer_that_wakes_up_after_a_takeover_writes_nothing(
    root: Path, run_program: RunProgram, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    zombie = run_program("-m", "tests.faults.log.log_child", str(root), "append", str(pipe))
    wait_until(lambda: "ready" in zombie.said(), 30, "the first entry")
    zombie.pause()
    with pytest.raises(LogFenced, match=f"pid {zombie.pid}"):
        folder_writer(root, SETTINGS)
    heir = folder_writer(root, SETTINGS, takeover=True)
    heir.append(Entry(rows(150, 7), Lsn(160)))
    zombie.unpause()
    pipe.write_text("go on\n")
    assert zombie.wait() == 0, zombie.said()
    assert zombie.output.read_text().split("\n")[1:4] == ["fenced"] * 3
    heir.append(entry(2))
    heir.close()
    assert commits(read_all(folder_reader(root))) == [100] * 3 + [150] + [200] * 3


def test_the_next_writer_removes_what_a_crash_left(root: Path) -> None:
    writer = folder_writer(root, SETTINGS)
    for _ in range(2):
        spool = writer.spool()
        spool.write(entry(1).rows)
        spool.write(entry(2).rows)
        spool._flush()
    assert leftovers(root)
    writer.close()
    folder_writer(root, SETTINGS).close()
    assert leftovers(root) == []
    assert read_all(folder_reader(root)).num_rows == 0

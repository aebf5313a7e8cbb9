"""What a reader sees of the folder: neither a listing nor retention may hide the oldest entries."""

import random
import threading
import time
from pathlib import Path

import pytest

from cdc.log.segments.folder.listing import LogFolder
from cdc.log.segments.retention import expired
from cdc.log.segments.segment_names import Segment
from cdc.model import Lsn


def segment(number: int) -> str:
    return str(Segment(number, number, 0, Lsn(number), Lsn(number), Lsn(number), 0, 0))


def test_a_listing_beside_a_writer_has_no_hole_at_its_beginning(tmp_path: Path) -> None:
    for round_ in range(30):
        root = tmp_path / str(round_)
        (root / "hot").mkdir(parents=True)
        (root / "history").mkdir()
        done = threading.Event()

        def write(hot: Path = root / "hot", done: threading.Event = done) -> None:
            for number in range(1, 400):
                (hot / segment(number)).touch()
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        reader = LogFolder(root)
        while not done.is_set():
            for folder in (reader, LogFolder(root)):
                kept = folder.view().chain.kept
                assert [item.start for item in kept] == list(range(1, len(kept) + 1))
        thread.join()
        assert len(LogFolder(root).view().chain.kept) == len(reader.view().chain.kept) == 399


@pytest.mark.parametrize("seed", range(8))
def test_a_reader_that_looks_again_and_again_sees_what_a_new_reader_sees(seed: int, tmp_path: Path) -> None:
    rng, reader, head, merged = random.Random(seed), LogFolder(tmp_path), 0, 0
    hot, history = tmp_path / "hot", tmp_path / "history"
    hot.mkdir()
    history.mkdir()
    for step in range(40):
        action = rng.choice(["append", "append", "append", "append some", "merge", "foreign file", "wait"])
        if action.startswith("append"):
            for _ in range(1 if action == "append" else rng.randint(2, 5)):
                head += 1
                (hot / segment(head)).touch()
        elif action == "merge" and merged < head:
            first, merged = merged + 1, rng.randint(merged + 1, head)
            (history / str(Segment(first, merged, 1, Lsn(first), Lsn(merged), Lsn(merged), 0, 0))).touch()
            for number in range(first, rng.randint(first, merged + 1)):  # a crash leaves some of them behind
                (hot / segment(number)).unlink()
        elif action == "foreign file":
            (hot / f"notes-{step}").touch()
        else:
            time.sleep(0.06)  # from then on an unchanged folder is not listed again
        if rng.random() < 0.8:
            seen, new = reader.view(), LogFolder(tmp_path).view()
            assert (seen.chain, seen.foreign_files) == (new.chain, new.foreign_files)
            assert {one: found.place for one, found in seen.stored.items()} == {
                one: found.place for one, found in new.stored.items()
            }


def test_a_segment_without_rows_does_not_expire_by_itself() -> None:
    marks = Segment(1, 1, 0, Lsn(1), Lsn(1), Lsn(1), 0, 0, marks=True)
    fresh = Segment(2, 2, 0, Lsn(2), Lsn(2), Lsn(2), 5, 1000)
    old = Segment(2, 2, 0, Lsn(2), Lsn(2), Lsn(2), 5, 10)
    assert list(expired([marks, fresh], {marks: 1, fresh: 1}, 500, 100, None)) == []
    assert list(expired([marks], {marks: 1}, 500, 100, None)) == []
    assert list(expired([marks, old], {marks: 1, old: 1}, 500, 100, None)) == [marks, old]
    assert list(expired([marks, fresh], {marks: 60, fresh: 60}, 500, 100, None)) == [marks]
    assert list(expired([marks, old], {marks: 1, old: 1}, 500, 100, 1)) == []

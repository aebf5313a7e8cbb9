"""What a reader sees of the folder: neither a listing nor retention may hide the oldest entries."""

import threading
from pathlib import Path

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
        while not done.is_set():
            kept = LogFolder(root).view().chain.kept
            assert [item.start for item in kept] == list(range(1, len(kept) + 1))
        thread.join()
        assert len(LogFolder(root).view().chain.kept) == 399


def test_a_segment_without_rows_does_not_expire_by_itself() -> None:
    marks = Segment(1, 1, 0, Lsn(1), Lsn(1), Lsn(1), 0, 0, marks=True)
    fresh = Segment(2, 2, 0, Lsn(2), Lsn(2), Lsn(2), 5, 1000)
    old = Segment(2, 2, 0, Lsn(2), Lsn(2), Lsn(2), 5, 10)
    assert list(expired([marks, fresh], {marks: 1, fresh: 1}, 500, 100, None)) == []
    assert list(expired([marks], {marks: 1}, 500, 100, None)) == []
    assert list(expired([marks, old], {marks: 1, old: 1}, 500, 100, None)) == [marks, old]
    assert list(expired([marks, fresh], {marks: 60, fresh: 60}, 500, 100, None)) == [marks]
    assert list(expired([marks, old], {marks: 1, old: 1}, 500, 100, 1)) == []

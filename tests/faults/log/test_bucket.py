"""What can go wrong under a segment log in a bucket: two writers, lost answers, a server that is away or refuses."""

import http.server
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import cdc.log
from cdc.errors import ConfigError, LogCorrupt, LogError, LogFenced, LogLost
from cdc.log.segments.bucket.access import LogBucket, check_bucket
from cdc.log.segments.bucket.writer import BucketWriter
from cdc.log.segments.log import SegmentSettings, SegmentWriter
from cdc.log.segments.quarantine import quarantine
from cdc.log.segments.segment_file import Encoding
from cdc.log.segments.segment_names import SequenceGap
from cdc.log.segments.storage import LogLocation
from cdc.model import Entry, Lsn
from tests.contract.logs import commits, entry, history, read_all, rows, settings_of
from tests.faults.log.test_segments import MERGE_POINTS
from tests.fix_processes import RunProgram, wait_until
from tests.fix_proxy import MakeProxy, Proxy
from tests.fix_s3 import S3Server
from tests.scenes.segment_logs import bucket_reader, bucket_writer, location

SETTINGS = SegmentSettings(hot_segments=2, retention_hours=1e6)
OpenWriter = Callable[..., SegmentWriter]


@pytest.fixture
def where(s3_server: S3Server, s3_url: str) -> LogLocation:
    return location(s3_url, s3_server.storage_options)


@pytest.fixture
def open_writer(where: LogLocation, tmp_path: Path) -> Iterator[OpenWriter]:
    """Opens writers on machines of their own: each has its own folder, so no file lock keeps them apart."""
    opened: list[SegmentWriter] = []

    def run(at: LogLocation = where, unreadable: int = 0, settings: SegmentSettings = SETTINGS) -> SegmentWriter:
        opened.append(bucket_writer(at, tmp_path / f"machine-{len(opened)}", settings, unreadable))
        return opened[-1]

    yield run
    for writer in opened:
        writer.close()


def paths(where: LogLocation, folder: str) -> list[str]:
    return [item.path for item in LogBucket(where).listed(folder) if item.size > 64]


# Two writers


def test_a_writer_that_was_replaced_writes_nothing_whatever_it_was_about_to_do(
    open_writer: OpenWriter, where: LogLocation
) -> None:
    old = open_writer()
    for number in range(1, 8):
        old.append(entry(number))
    spool = old.spool()
    spool.write(entry(8).rows)
    new = open_writer()
    assert new.progress().end == 710
    attempts: list[Callable[[], None]] = [
        lambda: old.append(entry(8)),
        lambda: spool.publish(entry(8).end),
        old.maintain,
    ]
    for attempt in attempts:
        with pytest.raises(LogFenced, match="another writer took over"):
            attempt()
    new.append(Entry(rows(750, 1), Lsn(760)))
    with pytest.raises(LogError):
        old.append(entry(8))
    new.maintain()
    new.append(entry(8))
    expected = [*commits(history(*range(1, 8))), 750, *commits(history(8))]
    assert commits(read_all(bucket_reader(where))) == expected


def test_a_writer_that_sleeps_through_two_successors_and_a_merge_is_still_fenced(
    open_writer: OpenWriter, where: LogLocation
) -> None:
    old = open_writer()
    old.append(entry(1))
    for first in (2, 12):
        successor = open_writer()
        for number in range(first, first + 10):
            successor.append(entry(number))
        successor.maintain()
    assert len(paths(where, "hot")) < 10, "the objects beside the old writer's next name are gone"
    attempts: list[Callable[[], None]] = [lambda: old.append(entry(2)), old.maintain]
    for attempt in attempts:
        with pytest.raises(LogFenced):
            attempt()
    assert read_all(bucket_reader(where)).equals(history(*range(1, 22)))


def test_of_writers_that_start_at_once_one_is_left_and_nothing_is_lost_or_doubled(
    open_writer: OpenWriter, where: LogLocation
) -> None:
    first = open_writer()
    first.append(entry(1))

    def begin(_: int) -> SegmentWriter | None:
        try:
            return open_writer()
        except LogFenced:
            return None

    with ThreadPoolExecutor(4) as pool:
        writers = [first, *filter(None, pool.map(begin, range(4)))]
    for number in (2, 3):
        written = 0
        for writer in writers:
            try:
                writer.append(entry(number))
                written += 1
            except LogError:
                continue
        assert written == 1
    assert read_all(bucket_reader(where)).equals(history(1, 2, 3))


def test_a_second_writer_on_the_same_machine_waits_for_the_first(
    open_writer: OpenWriter, where: LogLocation, tmp_path: Path
) -> None:
    writer = open_writer()
    with pytest.raises(LogFenced, match=f"pid {os.getpid()}"):
        bucket_writer(where, tmp_path / "machine-0", SETTINGS)
    writer.append(entry(1))


# Lost answers, and a server that is away


@pytest.fixture
def wire(s3_server: S3Server, proxy: MakeProxy) -> Proxy:
    return proxy(urlsplit(s3_server.url).port or 0)


@pytest.fixture
def far(wire: Proxy, s3_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> LogLocation:
    """The log, through the proxy; a request may take three seconds."""
    monkeypatch.setattr("cdc.log.segments.bucket.access._SECONDS", 3.0)
    return location(s3_url, {**s3_server.storage_options, "aws_endpoint_url": f"http://127.0.0.1:{wire.port}"})


def test_an_entry_whose_answer_was_lost_is_in_the_log_once(
    open_writer: OpenWriter, far: LogLocation, where: LogLocation, wire: Proxy
) -> None:
    writer = open_writer(far)
    for number in range(1, 6):
        wire.cut_after(1, "down")  # the server has done it, and says so to nobody
        writer.append(entry(number))
    spool = writer.spool()
    spool.write(entry(6).rows)
    wire.cut_after(1, "down")
    spool.publish(entry(6).end)
    assert read_all(bucket_reader(where)).equals(history(*range(1, 7)))


def test_a_bucket_that_is_away_is_named_and_the_log_goes_on_with_a_new_writer(
    open_writer: OpenWriter, far: LogLocation, wire: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.log.segments.bucket.sequence._PATIENCE_SECONDS", 0.1)
    writer = open_writer(far)
    writer.append(entry(1))
    wire.cut()
    with pytest.raises(LogLost, match="The bucket millrace of the log does not answer"):
        writer.append(entry(2))
    with pytest.raises(LogLost, match="The bucket millrace"):
        bucket_reader(far).head()
    with pytest.raises(LogLost, match="The bucket millrace"):
        check_bucket(far, 2)
    wire.pass_on()
    with pytest.raises(LogLost, match="Restart the process"):  # nobody knows whether the bucket has it
        writer.append(entry(2))
    again = open_writer(far)
    again.append(entry(2))
    again.append(entry(3))
    assert read_all(bucket_reader(far)).equals(history(1, 2, 3))


def test_a_bucket_that_accepts_connections_and_says_nothing_is_noticed_in_time(far: LogLocation, wire: Proxy) -> None:
    wire.stall()
    with pytest.raises(LogLost, match="The bucket millrace"):
        check_bucket(far, 2)


def test_an_append_outlasts_a_short_absence(
    open_writer: OpenWriter, far: LogLocation, where: LogLocation, wire: Proxy
) -> None:
    writer = open_writer(far)
    wire.cut()
    append = threading.Thread(target=writer.append, args=(entry(1),))
    append.start()
    append.join(1)
    assert append.is_alive()
    wire.pass_on()
    append.join(60)
    assert read_all(bucket_reader(where)).equals(history(1))


# A server that refuses


@pytest.mark.parametrize(
    ("changed", "uri", "message"),
    [
        ({"aws_secret_access_key": "wrong"}, "", "bucket millrace of the log refuses these credentials"),
        ({}, "s3://nowhere/log", "bucket nowhere of the log does not exist"),
    ],
    ids=["credentials", "bucket"],
)
def test_wrong_settings_are_named_to_writers_readers_and_commands_and_are_final(
    s3_server: S3Server, s3_url: str, open_writer: OpenWriter, changed: dict[str, str], uri: str, message: str
) -> None:
    wrong = location(uri or s3_url, {**s3_server.storage_options, **changed})
    attempts: list[Callable[[], object]] = [
        lambda: open_writer(wrong),
        lambda: bucket_reader(wrong).head(),
        lambda: check_bucket(wrong, 5),
    ]
    for attempt in attempts:
        with pytest.raises(LogError, match=message) as caught:
            attempt()
        assert not caught.value.transient
        assert "log." in caught.value.remedy
        assert "wrong" not in str(caught.value)


def test_an_unknown_option_is_an_error_of_the_pipeline_file(s3_url: str) -> None:
    with pytest.raises(ConfigError, match=r"log\.storage_options"):
        bucket_reader(location(s3_url, {"aws_no_such_option": "1"}))


class Careless(http.server.BaseHTTPRequestHandler):
    """A server with S3's protocol that ignores `If-None-Match`: every PUT succeeds."""

    def do_PUT(self) -> None:
        self._sent()
        self._answer(b"")

    def do_POST(self) -> None:
        """The removal of several objects."""
        keys = re.findall(rb"<Key>.*?</Key>", self._sent())
        self._answer(b"<DeleteResult>%b</DeleteResult>" % b"".join(b"<Deleted>%b</Deleted>" % key for key in keys))

    def _sent(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def test_a_server_that_ignores_the_condition_is_refused_before_anything_is_written(
    s3_server: S3Server, s3_url: str, open_writer: OpenWriter
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Careless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {**s3_server.storage_options, "aws_endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        with pytest.raises(LogError, match="ignores `If-None-Match"):
            open_writer(location(s3_url, options))
        server.shutdown()


def test_a_client_told_not_to_send_the_condition_is_refused_too(
    s3_server: S3Server, s3_url: str, open_writer: OpenWriter
) -> None:
    with pytest.raises(LogError, match="ignores `If-None-Match"):
        open_writer(location(s3_url, {**s3_server.storage_options, "aws_conditional_put": "disabled"}))


# Crashes of a merge


@pytest.mark.parametrize("point", MERGE_POINTS)
def test_a_merge_killed_anywhere_is_harmless_and_what_it_left_is_removed(
    open_writer: OpenWriter, where: LogLocation, run_program: RunProgram, tmp_path: Path, point: str
) -> None:
    writer = open_writer()
    for number in range(1, 9):
        writer.append(entry(number, marks={str(number): "x"}))
    writer.spool().write(entry(9).rows)
    place = {"uri": where.root, "options": dict(where.options), "folder": str(tmp_path / "child")}
    child = run_program(
        "-m", "tests.faults.log.log_child", json.dumps(place), "maintain", env={"MILLRACE_FAIL": f"{point}:kill"}
    )
    assert child.wait() == -signal.SIGKILL, child.said()
    assert read_all(bucket_reader(where)).equals(history(*range(1, 9)))
    again = open_writer()
    again.maintain()
    assert len(again.progress().marks) == 8
    found = bucket_reader(where)
    assert read_all(found).equals(history(*range(1, 9)))
    used = {part.path for stored in found.view().stored.values() for part in stored.parts()}  # type: ignore[attr-defined]
    assert {path for folder in ("hot", "history", "parts") for path in paths(where, folder)} == used
    assert len(paths(where, "manifests")) == 1


# Readers


def test_a_reader_that_slept_through_merges_goes_on_where_it_was(open_writer: OpenWriter, where: LogLocation) -> None:
    writer, reader = open_writer(), bucket_reader(where)
    writer.append(entry(1))
    head, _ = reader.head()
    for number in range(2, 30):
        writer.append(entry(number))
    writer.maintain()
    assert len(paths(where, "hot")) < 5
    wait_until(lambda: reader.head()[1] == entry(29).end, 20, "the reader sees the merged entries")
    assert [piece.end for piece in reader.read(head)] == [100 * number + 10 for number in range(2, 30)]


def test_a_merge_during_a_read_loses_and_doubles_nothing(open_writer: OpenWriter, where: LogLocation) -> None:
    writer = open_writer()
    for number in range(1, 20):
        writer.append(entry(number))
    reader = bucket_reader(where)
    pieces = reader.read(reader.start())
    seen = [next(pieces).end]
    reader.storage._cache._known.clear()  # type: ignore[attr-defined]
    writer.maintain()
    seen += [piece.end for piece in pieces]
    assert seen == [100 * number + 10 for number in range(1, 20)]


def test_looking_at_an_idle_log_is_one_request_and_lists_nothing(
    open_writer: OpenWriter, where: LogLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.log.segments.bucket.storage._LISTING_SECONDS", 3600.0)
    writer, reader = open_writer(), bucket_reader(where)
    for number in range(1, 4):
        writer.append(entry(number))
    assert reader.head()[1] == 310
    asked: list[str] = []
    for name in ("get", "tail", "between", "listed", "put", "create"):
        original = getattr(LogBucket, name)

        def counted(
            bucket: LogBucket, *args: object, _name: str = name, _original: Callable[..., object] = original
        ) -> object:
            asked.append(_name)
            return _original(bucket, *args)

        monkeypatch.setattr(LogBucket, name, counted)
    for _ in range(5):
        assert reader.head()[1] == 310
    assert asked == ["tail"] * 5
    asked.clear()
    writer.append(entry(4))
    assert asked == ["create"]
    assert [piece.end for piece in reader.read(reader.seek(Lsn(310)))] == [410]
    assert set(asked) == {"create", "tail"}, "a small segment is read in the request that finds it"


# Foreign and damaged objects


def test_a_damaged_segment_is_named_and_can_be_quarantined(
    open_writer: OpenWriter, where: LogLocation, tmp_path: Path
) -> None:
    writer = open_writer()
    for number in (1, 2, 3):
        writer.append(entry(number, marks={str(number): "x"}))
    writer.close()
    bad = paths(where, "hot")[1]
    LogBucket(where).put(bad, b"garbage" * 20)
    with pytest.raises(LogCorrupt, match=bad):
        bucket_reader(where).head()
    with pytest.raises(LogCorrupt, match=bad):
        open_writer()
    with closing(BucketWriter(where, tmp_path / "quarantine", Encoding(), unreadable=2)) as storage:
        assert quarantine(storage, 2).start == 2
    assert read_all(bucket_reader(where)).equals(history(1, 3))
    assert paths(where, "quarantine") == [f"quarantine/{bad.rpartition('/')[2]}"]
    again = open_writer()
    assert again.progress().end == 310
    assert set(again.progress().marks) == {"1", "3"}


def test_a_lost_segment_is_an_error_and_a_foreign_object_is_not(open_writer: OpenWriter, where: LogLocation) -> None:
    writer = open_writer()
    for number in (1, 2, 3):
        writer.append(entry(number))
    bucket = LogBucket(where)
    bucket.put("hot/notes.txt", b"not ours" * 20)
    reader = bucket_reader(where)
    assert read_all(reader).equals(history(1, 2, 3))
    assert reader.view().foreign_files == ("hot/notes.txt",)
    bucket.delete([paths(where, "hot")[1]])
    with pytest.raises(SequenceGap, match="sequence numbers 2 to 2 are missing"):
        bucket_reader(where).head()


def test_a_segment_larger_than_a_request_is_read_in_pieces(
    open_writer: OpenWriter, where: LogLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.log.segments.bucket.content._TAIL_BYTES", 1000)
    monkeypatch.setattr("cdc.log.segments.bucket.content._WHOLE_BYTES", 1000)
    monkeypatch.setattr("cdc.object_store.object_file._BLOCK_BYTES", 700)
    writer = open_writer()
    large = Entry(rows(100, *range(5_000)), Lsn(110))
    writer.append(large)
    reader = bucket_reader(where)
    assert read_all(reader).equals(large.rows)
    bucket = LogBucket(where)
    bucket.delete(paths(where, "hot"))
    with pytest.raises(LogCorrupt, match="is listed but cannot be found"):
        read_all(reader)


def test_settings_with_a_bucket_keep_their_credentials_to_themselves(s3_server: S3Server, s3_url: str) -> None:
    secret = s3_server.storage_options["aws_secret_access_key"]
    data = {"log": {"kind": "segments", "uri": s3_url, "storage_options": s3_server.storage_options}}
    settings = settings_of(data)
    shown = [repr(settings), settings.model_dump_json(), repr(location(s3_url, s3_server.storage_options))]
    assert [text for text in shown if secret in text] == []
    assert cdc.log.open_reader(settings).head()[0] == "0"

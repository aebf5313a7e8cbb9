"""Delta tables in S3: every commit is one conditional PUT, of `deltalake` and of Millrace alike.

The whole contract of a sink runs there, too: `delta-s3` in tests/contract.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from deltalake import DeltaTable

from cdc.errors import Busy, Lost, SinkError, StoreRefused
from cdc.model import Column, TableId, TableSchema
from cdc.ports import Batch
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.files.storage import storage_of
from sinks.delta.settings import DeltaSettings
from tests import fix_delta
from tests.fix_delta import mark_everywhere
from tests.fix_s3 import S3Server
from tests.scenes.histories import INT4, TEXT
from tests.scenes.staged_sink import split

ITEMS = TableSchema(TableId("public", "items"), (Column("id", INT4, key=True), Column("label", TEXT)), 1)


class OpenBucket(Protocol):
    """Opens a sink on the test's prefix; `changed` are storage options."""

    def __call__(self, path: str = "", changed: dict[str, str] | None = None, **settings: Any) -> delta.DeltaSink: ...


@pytest.fixture
def open_bucket(s3_server: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenBucket:
    mark_everywhere(monkeypatch)

    def opened(path: str = "", changed: dict[str, str] | None = None, **settings: Any) -> delta.DeltaSink:
        options = {**s3_server.storage_options, **(changed or {})}
        known = DeltaSettings.model_validate({"path": path or s3_url, "storage_options": options, **settings})
        return delta.open_sink(known, SinkContext(tmp_path, wait=lambda _: None))

    return opened


def numbers(ids: range, version: int, label: str = "row") -> Batch:
    return fix_delta.numbers(ITEMS, ids, version, label)


def labels(sink: delta.DeltaSink) -> dict[int, str]:
    return {row["id"]: row["label"] for row in sink.stored(ITEMS).to_pylist()}


def table_of(s3_server: S3Server, s3_url: str) -> DeltaTable:
    return DeltaTable(f"{s3_url}/public.items", storage_options=s3_server.storage_options)


def run_all(*actions: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []


def until_done(action: Callable[[], None]) -> None:
    while True:
        try:
            action()
        except Busy:
            continue
        return


def test_no_commit_of_concurrent_writers_is_lost(open_bucket: OpenBucket, s3_server: S3Server, s3_url: str) -> None:
    """Two write with deletion vectors, one stages, one is `deltalake` alone: each changes rows of its own."""
    first = open_bucket()
    first.prepare(ITEMS)
    first.apply(numbers(range(80), 5))

    def applies(number: int, **settings: Any) -> Callable[[], None]:
        sink = open_bucket(**settings)

        def run() -> None:
            for version in range(10, 13):
                given = numbers(range(number, 80, 4), version, f"w{version}")
                until_done(lambda: sink.apply(given))  # noqa: B023 - called at once

        return run

    def stages() -> None:
        sink = open_bucket()
        for version in range(10, 13):
            until_done(lambda: staged(sink, numbers(range(3, 80, 4), version, f"w{version}")))  # noqa: B023

    run_all(applies(0), applies(1), applies(2, deletion_vectors=False), stages)
    assert labels(first) == {number: f"w12 {number}" for number in range(80)}
    commits = [one for one in table_of(s3_server, s3_url).history() if one["operation"] in ("MERGE", "WRITE")]
    assert len(commits) == 1 + 4 * 3


def staged(sink: delta.DeltaSink, given: Batch) -> None:
    plan = sink.plan(ITEMS)
    assert plan
    sink.commit_staged(ITEMS, plan, [sink.stage(part, plan).content for _, part in split(given)])


def test_old_rows_are_marked_and_maintenance_keeps_every_row(
    open_bucket: OpenBucket, s3_server: S3Server, s3_url: str
) -> None:
    sink = open_bucket()
    sink.prepare(ITEMS)
    sink.apply(numbers(range(500), 5))
    for version in range(6, 10):
        sink.apply(numbers(range(version, 500, 50), version, "new"))
    adds = table_of(s3_server, s3_url)
    assert adds.protocol().reader_features == ["deletionVectors"] and len(adds.file_uris()) == 5
    before = labels(sink)
    sink.maintain(ITEMS)
    assert labels(open_bucket()) == before and len(before) == 500


@pytest.mark.parametrize(
    "options",
    [{"aws_s3_locking_provider": "dynamodb"}, {"aws_s3_allow_unsafe_rename": "true"}],
    ids=["a lock table", "unsafe renames"],
)
def test_where_deltalake_excludes_others_in_another_way_it_alone_writes(
    s3_server: S3Server, options: dict[str, str]
) -> None:
    assert storage_of("s3://bucket/table", {**s3_server.storage_options, **options}) is None
    assert storage_of("s3://bucket/table", s3_server.storage_options) is not None
    assert storage_of("abfss://container@account/table", {}) is None


def test_without_conditional_puts_nothing_is_written_by_hand(open_bucket: OpenBucket) -> None:
    sink = open_bucket(changed={"aws_conditional_put": "disabled"})
    writer = sink.store(ITEMS.table).vectors
    assert writer is not None and not writer.live.storage.excludes_others()


@pytest.mark.parametrize(
    ("path", "changed", "kind", "said"),
    [
        ("s3://no-such-bucket/lake", {}, StoreRefused, "The bucket no-such-bucket does not exist"),
        ("", {"aws_secret_access_key": "planted-wrong-secret"}, StoreRefused, "refuses these credentials"),
        ("", {"aws_endpoint_url": "http://127.0.0.1:1"}, Lost, "cannot be reached"),
    ],
    ids=["no bucket", "wrong secret", "no server"],
)
def test_an_unusable_bucket_is_named_without_its_credentials(
    open_bucket: OpenBucket,
    s3_server: S3Server,
    caplog: pytest.LogCaptureFixture,
    path: str,
    changed: dict[str, str],
    kind: type[SinkError],
    said: str,
) -> None:
    quick = {"max_retries": "0"} if kind is Lost else {}
    with caplog.at_level(logging.DEBUG), pytest.raises(kind, match=said) as found:
        open_bucket(path, {**changed, **quick}).prepare(ITEMS)
    shown = f"{found.value!r} {found.value.__cause__} {caplog.text}"
    for secret in (s3_server.storage_options["aws_secret_access_key"], "planted-wrong-secret"):
        assert secret not in shown
    assert found.value.__cause__ is None or kind is Lost


def test_a_server_that_was_gone_is_used_again(open_bucket: OpenBucket, s3_server: S3Server) -> None:
    sink = open_bucket()
    sink.prepare(ITEMS)
    sink.apply(numbers(range(10), 5))
    s3_server.kill()
    with pytest.raises(Lost):
        open_bucket(changed={"aws_max_retries": "0"}).apply(numbers(range(5), 9, "new"))
    s3_server.start()
    sink.apply(numbers(range(5), 9, "new"))
    assert labels(sink)[3] == "new 3" and len(labels(sink)) == 10

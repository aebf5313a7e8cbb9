"""A bench for each kind of log: what the contract suite needs beyond the log itself.

To put a new kind under the suite, write its bench and add one line to LOGS.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

import pyarrow as pa
import pytest

import cdc.log
from cdc.config.pipeline_file import check
from cdc.config.settings import Settings
from cdc.model import LOG_SCHEMA, Entry, Lsn
from cdc.ports import LogReader, LogWriter

DAY = datetime(2026, 3, 1, tzinfo=UTC)


class Bench(Protocol):
    """One empty log for one test."""

    def data(self) -> Mapping[str, object]:
        """The pipeline as plain data: it travels to child processes as JSON."""

    @property
    def fail_points(self) -> Sequence[str]:
        """Where this log's writer may die."""


class SegmentsBench:
    """Files in the test's own folder."""

    fail_points = ("log.before_write", "log.before_rename", "log.after_append", "log.spool_publish")

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._state = request.getfixturevalue("tmp_path") / "state"

    def data(self) -> Mapping[str, object]:
        return {"state": str(self._state), "log": {"kind": "segments", "hot_segments": 4, "retention_hours": 1e6}}


class BucketBench:
    """Objects in a prefix of the test's own."""

    fail_points = ("log.before_write", "log.before_put", "log.after_put", "log.after_append", "log.spool_publish")

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._state = request.getfixturevalue("tmp_path") / "state"
        self._uri = request.getfixturevalue("s3_url")
        self._options = request.getfixturevalue("s3_server").storage_options

    def data(self) -> Mapping[str, object]:
        place = {"kind": "segments", "uri": self._uri, "storage_options": self._options}
        return {"state": str(self._state), "log": {**place, "hot_segments": 4, "retention_hours": 1e6}}


class KafkaBench:
    """Topics of the test's own on the session's broker."""

    fail_points = (
        "log.before_write",
        "log.before_position",
        "log.before_commit",
        "log.after_append",
        "log.spool_publish",
    )

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._state = request.getfixturevalue("tmp_path") / "state"
        self._bootstrap = request.getfixturevalue("kafka_server").url
        self._prefix = request.getfixturevalue("topic_prefix")

    def data(self) -> Mapping[str, object]:
        log = {"kind": "kafka", "bootstrap": self._bootstrap, "prefix": self._prefix, "retention_hours": 1e6}
        return {"state": str(self._state), "log": log}


LOGS: dict[str, Callable[[pytest.FixtureRequest], Bench]] = {
    "kafka": KafkaBench,
    "segments": SegmentsBench,
    "segments in a bucket": BucketBench,
}

READ_ONLY = {"debezium"}
"""Kinds that somebody else writes: their tests are tests/integration/log/test_debezium.py."""


def settings_of(data: Mapping[str, object]) -> Settings:
    """The settings of a bench's data."""
    return check(data, cdc.log.settings_kinds(), {}, "test")


def open_writer(bench: Bench) -> LogWriter:
    """The bench's writer."""
    return cdc.log.open_writer(settings_of(bench.data()))


def open_reader(bench: Bench) -> LogReader:
    """A reader of the bench."""
    return cdc.log.open_reader(settings_of(bench.data()))


def rows(commit: int, *ids: int, table: str = "public.items", op: str = "u", at: datetime | None = None) -> pa.Table:
    """Changes of one transaction whose commit record is at `commit`; a second passes per LSN."""
    when = at or DAY + timedelta(seconds=commit)
    return pa.Table.from_pylist(
        [
            {
                "table": table,
                "op": op,
                "key": json.dumps({"id": number}),
                "after": None if op == "d" else json.dumps({"id": number, "name": f"n{number}@{commit}"}),
                "version": commit - len(ids) + place,
                "commit_lsn": commit,
                "ordinal": place,
                "xid": commit,
                "commit_ts": when,
                "schema_id": 1,
            }
            for place, number in enumerate(ids)
        ],
        LOG_SCHEMA,
    )


def entry(number: int, size: int = 3, marks: Mapping[str, str] | None = None) -> Entry:
    """The n-th transaction of the standard history: commit record at 100·n, ending at 100·n + 10."""
    return Entry(rows(100 * number, *range(number, number + size)), Lsn(100 * number + 10), marks or {})


def read_all(reader: LogReader) -> pa.Table:
    """Every row of the log, in order."""
    tables = [piece.rows for piece in reader.read(reader.start())]
    return pa.concat_tables([LOG_SCHEMA.empty_table(), *tables])


def history(*numbers: int) -> pa.Table:
    """The rows of those entries, once each, in that order."""
    return pa.concat_tables([LOG_SCHEMA.empty_table(), *(entry(number).rows for number in numbers)])


def commits(table: pa.Table) -> list[int]:
    """The commit LSNs of a table, one per row: short to compare, and a double shows."""
    return [int(lsn) for lsn in table["commit_lsn"].to_numpy()]

"""A segment log in a bucket: from Postgres by the real reader, and as the commands see it."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cdc.capture.source.doctor import Verdict
from cdc.cli.operate.log import app
from cdc.cli.setup.doctor import _of_log
from cdc.config.secret import Secret
from cdc.config.settings import Settings
from cdc.errors import ConfigError, LogFenced
from cdc.log.segments.bucket.access import LogBucket
from cdc.log.segments.log import SegmentSettings
from cdc.log.segments.reader import storage_at
from cdc.log.segments.storage import LogLocation
from cdc.model import Lsn
from cdc.service.daemon.process import settings_from
from cdc.service.daemon.reload import plan
from tests.contract.logs import commits, entry, read_all
from tests.fix_processes import RunProgram
from tests.fix_s3 import S3Server
from tests.fix_servers import Database
from tests.scenes.logs_elsewhere import ElsewhereRig, assert_snapshot_and_stream_arrive_whole
from tests.scenes.segment_logs import bucket_reader, bucket_writer, location


def test_snapshot_and_stream_arrive_whole_in_a_bucket(
    s3_server: S3Server, s3_url: str, database: Database, state_dir: Path, run_program: RunProgram
) -> None:
    options = {name: Secret(value) for name, value in s3_server.storage_options.items()}
    log = SegmentSettings(uri=s3_url, storage_options=options)
    assert_snapshot_and_stream_arrive_whole(ElsewhereRig(database, state_dir, run_program, log))


@pytest.fixture
def where(s3_server: S3Server, s3_url: str) -> LogLocation:
    return location(s3_url, s3_server.storage_options)


@pytest.fixture
def config(where: LogLocation, tmp_path: Path) -> Path:
    """Five entries, of which a consumer has read three."""
    writer = bucket_writer(where, tmp_path / "state" / "log", SegmentSettings(retention_hours=1e6))
    for number in range(1, 6):
        writer.append(entry(number))
    writer.close()
    bucket_reader(where).commit("lake", Lsn(310))
    path = tmp_path / "millrace.yaml"
    log = {"kind": "segments", "uri": where.root, "storage_options": dict(where.options)}
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump({"state": str(tmp_path / "state"), "log": log}))
    return path


def run(config: Path, *words: str) -> str:
    storage_at.cache_clear()  # a command is a process of its own
    result = CliRunner().invoke(app, [*words, "--config", str(config)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_show_compact_and_trim_a_log_in_a_bucket(config: Path, where: LogLocation) -> None:
    found = json.loads(run(config, "positions", "--json"))
    assert (found["start"], found["head"], found["consumers"][0]["lag_entries"]) == ("0", "5", 2)
    assert [item["offset"] for item in json.loads(run(config, "show", "--since", "0/136", "--json"))] == ["4", "5"]
    assert json.loads(run(config, "compact", "--json"))["rows"] == 4
    rest = [400] * 3 + [500] * 3
    assert commits(read_all(bucket_reader(where))) == [100, 200, 300, 300, 300, *rest]
    assert "Removed 3 entries" in run(config, "trim", "--hours", "0", "--yes")
    assert commits(read_all(bucket_reader(where))) == rest
    assert "Forgot lake" in run(config, "forget", "lake")
    assert json.loads(run(config, "positions", "--json"))["consumers"] == []
    run(config, "trim", "--gb", "0", "--force", "--yes")
    found = json.loads(run(config, "positions", "--json"))
    assert (found["start"], found["head"], found["end"]) == ("5", "5", "0/1FE")


def test_doctor_asks_the_bucket_and_says_what_is_wrong_with_it(config: Path, where: LogLocation) -> None:
    settings = settings_from(config)
    assert [(found.verdict, found.object) for found in _of_log(settings)] == [(Verdict.OK, where.root)]
    gone = settings.model_copy(update={"log": settings.log.model_copy(update={"uri": "s3://nowhere/log"})})
    (finding,) = _of_log(gone)
    assert finding.verdict is Verdict.FAIL and "nowhere" in finding.message and "log.uri" in finding.remedy
    assert _of_log(Settings()) == []


def test_an_unreadable_segment_is_quarantined_by_its_sequence_number(config: Path, where: LogLocation) -> None:
    bucket = LogBucket(where)
    bad = [item.path for item in bucket.listed("hot") if item.size > 64][2]
    bucket.put(bad, b"garbage" * 100)
    assert "segment 3..3" in run(config, "quarantine", "3", "--yes")
    assert [item["rows"] for item in json.loads(run(config, "show", "--json"))] == [3, 3, 0, 3, 3]
    assert len(list(bucket.listed("quarantine"))) == 1


def test_a_log_is_shrunk_only_while_nobody_writes(config: Path, where: LogLocation, tmp_path: Path) -> None:
    writer = bucket_writer(where, tmp_path / "state" / "log", SegmentSettings())
    with pytest.raises(LogFenced, match="Another process writes"):
        run(config, "compact")
    writer.append(entry(6))
    writer.close()


def test_the_bucket_cannot_change_while_the_pipeline_runs() -> None:
    before, after = (Settings(log=SegmentSettings(uri=uri)) for uri in ("s3://one/log", "s3://two/log"))
    with pytest.raises(ConfigError, match=r"log\.uri cannot change"):
        plan(before, after)

"""`millrace log …` on a log made here."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from cdc.cli.operate.log import app
from cdc.errors import ConfigError, LogFenced
from cdc.log.segments.log import SegmentSettings
from cdc.model import Lsn
from tests.contract.logs import commits, entry, read_all
from tests.scenes.segment_logs import folder_reader, folder_writer


@pytest.fixture
def config(tmp_path: Path) -> Path:
    writer = folder_writer(tmp_path / "state" / "log", SegmentSettings(retention_hours=1e6))
    for number in range(1, 6):
        writer.append(entry(number))
    writer.close()
    folder_reader(tmp_path / "state" / "log").commit("lake", Lsn(310))
    path = tmp_path / "millrace.yaml"
    path.write_text(f"state: {tmp_path / 'state'}\n")
    return path


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_positions_show_the_head_and_how_far_each_consumer_is(config: Path) -> None:
    found = json.loads(run("positions", "--json", "--config", str(config)))
    assert (found["start"], found["head"], found["end"]) == ("0", "5", "0/1FE")
    consumer = found["consumers"][0]
    assert (consumer["consumer"], consumer["reached"]) == ("lake", "0/136")
    assert (consumer["lag_bytes"], consumer["lag_entries"]) == (200, 2)
    assert "lake" in run("positions", "--config", str(config))


def test_tail_shows_the_newest_entries_without_their_values(config: Path) -> None:
    output = run("tail", "-n", "2", "--json", "--config", str(config))
    assert [found["end"] for found in json.loads(output)] == ["0/19A", "0/1FE"]
    assert "n5@" not in output


def test_show_begins_after_an_lsn(config: Path) -> None:
    found = json.loads(run("show", "--since", "0/136", "--json", "--config", str(config)))
    assert [item["offset"] for item in found] == ["4", "5"]
    assert found[0]["tables"] == ["public.items"]
    assert found[0]["rows"] == 3
    assert "public.items" in run("show", "--config", str(config))


def test_values_are_printed_only_when_asked_for(config: Path) -> None:
    lines = run("tail", "-n", "1", "--values", "--config", str(config)).splitlines()
    assert [json.loads(line)["op"] for line in lines] == ["u", "u", "u"]
    assert json.loads(json.loads(lines[0])["after"])["name"] == "n5@500"


def test_a_consumer_that_is_gone_is_forgotten_by_name(config: Path) -> None:
    assert "Forgot lake" in run("forget", "lake", "--config", str(config))
    assert json.loads(run("positions", "--json", "--config", str(config)))["consumers"] == []
    with pytest.raises(ConfigError, match="No consumer 'lake'"):
        run("forget", "lake", "--config", str(config))


def test_a_bad_segment_is_set_aside_by_its_sequence_number(config: Path, tmp_path: Path) -> None:
    bad = sorted((tmp_path / "state" / "log" / "hot").iterdir())[2]
    bad.write_bytes(b"garbage")
    assert "segment 3..3" in run("quarantine", "3", "--yes", "--config", str(config))
    found = json.loads(run("show", "--json", "--config", str(config)))
    assert [item["rows"] for item in found] == [3, 3, 0, 3, 3]


def test_compaction_says_first_what_would_go_and_leaves_what_a_consumer_has_not_read(config: Path) -> None:
    before = commits(_rows(config))
    said = json.loads(run("compact", "--dry-run", "--json", "--config", str(config)))
    assert said["dry_run"] and commits(_rows(config)) == before
    done = json.loads(run("compact", "--json", "--config", str(config)))
    assert (done["rows"], said["rows"]) == (4, 4)
    # Entries of keys n to n+2: of the first three, which everybody has read, each key's newest is left.
    assert commits(_rows(config)) == [100, 200, 300, 300, 300, *before[9:]]
    assert "0 replaced" in run("compact", "--config", str(config))


def test_a_forced_compaction_also_drops_what_nobody_has_read_yet(config: Path) -> None:
    assert json.loads(run("compact", "--force", "--json", "--config", str(config)))["rows"] == 8
    assert commits(_rows(config)) == [100, 200, 300, 400, 500, 500, 500]


def test_trimming_says_first_what_would_go_and_stops_at_the_slowest_consumer(config: Path) -> None:
    said = json.loads(run("trim", "--hours", "0", "--dry-run", "--json", "--config", str(config)))
    assert said == {"entries": 3, "rows": 9, "until": "3", "dry_run": True}
    assert len(_rows(config)) == 15
    assert "Removed 3 entries with 9 change(s)" in run("trim", "--hours", "0", "--yes", "--config", str(config))
    assert commits(_rows(config)) == [400] * 3 + [500] * 3


def test_a_forced_trim_takes_what_nobody_has_read_and_keeps_the_position(config: Path) -> None:
    run("trim", "--gb", "0", "--force", "--yes", "--config", str(config))
    found = json.loads(run("positions", "--json", "--config", str(config)))
    assert (found["start"], found["head"], found["end"]) == ("5", "5", "0/1FE")


def test_trimming_is_asked_about(config: Path) -> None:
    result = CliRunner().invoke(app, ["trim", "--hours", "0", "--config", str(config)], input="n\n")
    assert result.exit_code == 1 and len(_rows(config)) == 15


def test_room_is_made_only_while_nobody_writes(config: Path) -> None:
    writer = folder_writer(config.parent / "state" / "log", SegmentSettings())
    with pytest.raises(LogFenced, match="Another process writes"):
        run("compact", "--config", str(config))
    writer.close()


def _rows(config: Path) -> pa.Table:
    return read_all(folder_reader(config.parent / "state" / "log"))

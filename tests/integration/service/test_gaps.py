"""A sink that is added after retention removed the log's beginning says what it lacks, until that was read again."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cdc.config.settings import Settings
from cdc.log.kafka.read.reader import KafkaReader
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.segments.log import SegmentWriter
from cdc.model import ZERO_LSN, Lsn, format_lsn, parse_lsn
from cdc.service.apply.sink_worker import SinkWorker
from cdc.service.observe.health import reasons
from cdc.service.state import status
from cdc.service.state.gaps import GapFile
from tests.fix_log import FilledLog
from tests.fix_servers import LocalServer
from tests.scenes import kafka_rows
from tests.scenes.histories import change, table
from views.output_files import OutputFolder

ITEMS = table()


@pytest.fixture
def trimmed(filled_log: FilledLog) -> FilledLog:
    """A log whose first entries are gone."""
    filled_log.record(ITEMS)
    for version in (100, 200, 300):
        filled_log.append([change("c", f'{{"id":{version}}}', version, f'{{"id":{version}}}')])
    writer = filled_log.writer
    assert isinstance(writer, SegmentWriter)
    assert writer.trim(0.0, 0.0, force=True) > 0
    filled_log.append([change("c", '{"id":400}', 400, '{"id":400}')])
    return filled_log


@pytest.fixture
def pipeline(settings_of: Callable[..., Settings]) -> Settings:
    return settings_of(
        source={"tables": ["public.items", "public.other"]},
        sinks=[{"kind": "memory"}, {"kind": "memory", "name": "old"}],
    )


def gap_of(settings: Settings, log: FilledLog, sink: int = 0) -> Any:
    """What a start of the sink finds; it then registers as a reader, as its query does."""
    found = GapFile(settings, settings.sinks[sink], log.reader).gap()
    log.reader.commit(settings.sinks[sink].name, ZERO_LSN)
    return found


def tell(settings: Settings, **facts: object) -> None:
    status.publish(settings.state, "capture", facts)


def backfill(table: str, at: str, state: str = "done", *, whole: bool = True) -> dict[str, object]:
    return {"id": at, "table": table, "state": state, "whole": whole, "rows": 1}


def test_a_new_sink_on_a_log_without_its_beginning_names_tables_and_remedy(
    pipeline: Settings, trimmed: FilledLog, caplog: pytest.LogCaptureFixture
) -> None:
    gap = gap_of(pipeline, trimmed)
    assert gap.tables == ("public.items", "public.other")
    assert gap.removed == trimmed.reader.removed() > 0
    assert "is new and lacks the rows of public.items, public.other" in caplog.text
    assert "millrace backfill public.items; millrace backfill public.other" in caplog.text


@pytest.mark.usefixtures("copy_engine")
def test_the_views_of_a_new_sink_are_asked_for_all_their_rows(
    settings_of: Callable[..., Settings], trimmed: FilledLog
) -> None:
    views = [{"kind": "copied", "name": "copy", "source": "public.items"}]
    settings = settings_of(source={"tables": ["public.items"]}, views=views, sinks=[{"kind": "memory"}])
    folder = OutputFolder(settings.state, "copy")
    assert gap_of(settings, trimmed).tables == ("public.items", "view.copy")
    request = folder.asked_to_emit_again()
    assert request
    assert gap_of(settings, trimmed).tables == ("public.items", "view.copy")
    assert folder.asked_to_emit_again() == request
    folder.emitted_again(request)
    assert gap_of(settings, trimmed).tables == ("public.items",)


def test_health_says_so_until_it_is_made_good(pipeline: Settings, trimmed: FilledLog) -> None:
    now = datetime.now(UTC)
    said = {"state": "running", "gap": gap_of(pipeline, trimmed).facts()}
    apply = {"state": "running", "at": now.isoformat(), "sinks": {"memory": said}}
    capture = {"state": "streaming", "at": now.isoformat()}
    (reason,) = reasons(capture, apply, ("memory",), now)
    assert (reason.part, "lacks the rows of public.items" in reason.message) == ("sink memory", True)
    assert "millrace backfill public.items" in reason.remedy


def test_a_running_sink_has_it_in_its_status(pipeline: Settings, trimmed: FilledLog) -> None:
    lane = SinkWorker(pipeline, pipeline.sinks[0], trimmed.reader, no_spark)
    try:
        assert "lacks the rows of public.items" in str(lane.facts()["gap"])
        tell(pipeline, history_exact_from=format_lsn(parse_lsn("1/0")))
        assert "gap" not in lane.facts()
    finally:
        lane.end()


def no_spark() -> Any:
    raise AssertionError("the query was not started")


def test_a_sink_that_read_the_beginning_lacks_nothing(pipeline: Settings, trimmed: FilledLog) -> None:
    trimmed.reader.commit("old", parse_lsn("0/1"))
    assert gap_of(pipeline, trimmed, 1) is None


def test_a_new_sink_on_a_whole_log_lacks_nothing(pipeline: Settings, filled_log: FilledLog) -> None:
    filled_log.record(ITEMS)
    filled_log.append([change("c", '{"id":1}', 100, '{"id":1}')])
    assert filled_log.reader.removed() == 0
    assert gap_of(pipeline, filled_log) is None


def test_only_a_whole_backfill_that_was_asked_for_later_settles_a_table(pipeline: Settings, trimmed: FilledLog) -> None:
    noted = gap_of(pipeline, trimmed).noted
    later, before = f"{noted + 1:X}", f"{noted - 1:X}"
    jobs = [
        backfill("public.items", before),
        backfill("public.items", later, whole=False),
        backfill("public.items", later, "running"),
        backfill("public.items", "table:public.items"),
    ]
    tell(pipeline, backfills=jobs)
    assert gap_of(pipeline, trimmed).tables == ("public.items", "public.other")
    tell(pipeline, backfills=[backfill("public.items", later)])
    assert gap_of(pipeline, trimmed).tables == ("public.other",)
    tell(pipeline, backfills=[backfill("public.other", later)])  # the other is remembered as settled
    assert gap_of(pipeline, trimmed) is None
    tell(pipeline, backfills=[])
    assert not list((Path(pipeline.state) / "checkpoints").glob("*.gap"))


def test_a_resync_settles_every_table(pipeline: Settings, trimmed: FilledLog) -> None:
    gap = gap_of(pipeline, trimmed)
    tell(pipeline, history_exact_from=format_lsn(gap.noted))
    assert gap_of(pipeline, trimmed) is not None
    tell(pipeline, history_exact_from=format_lsn(parse_lsn("1/0")))
    assert gap_of(pipeline, trimmed) is None


@pytest.mark.kafka
def test_a_kafka_log_says_up_to_where_it_was_emptied(
    kafka_server: LocalServer, topic_prefix: str, tmp_path: Path
) -> None:
    short = KafkaSettings(bootstrap=kafka_server.url, prefix=topic_prefix, retention_hours=0.001)
    log = kafka_rows.writer(short, tmp_path)  # the rows of these tests are from January
    for lsn in (10, 20, 30):
        log.append(kafka_rows.batch(lsn, 20))
    reader = KafkaReader(short)
    assert reader.removed() == 0
    reader.commit("lake", Lsn(20))
    log.maintain()
    assert KafkaReader(short).removed() == 20

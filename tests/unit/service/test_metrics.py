"""Metrics: what is documented is what is exported, few series, and lags that grow while nothing moves."""

import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdc.model import Lsn
from cdc.service.observe.disk_forecast import DiskForecast
from cdc.service.observe.lag import LagInputs, Lags, SinkLag
from cdc.service.observe.metric_families import FAMILIES
from cdc.service.observe.metrics import MOST_TABLES, OTHERS, document, exposition
from cdc.service.observe.observer import Observation
from cdc.service.state.sink_positions import SinkPosition
from sinks.apply.timings import Histogram

_DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
_START = 1_700_000_000.0


def full(tables: int = 2) -> Observation:
    """A pipeline that has said everything it can say."""
    visible = Histogram()
    visible.add([0.07, 0.3, 7200.0])
    names = [f"public.t{number:04d}" for number in range(tables)]
    sink = {
        "state": "running",
        "changes": dict.fromkeys(names, 5),
        "dead_letters": 1,
        "tables_waiting": {names[0]: {"message": "no key", "remedy": "give it one"}},
        "tables_skipped": [names[1]],
        "losses": {names[0]: {"message": "flushed", "remedy": "refill it"}},
        "restarts": 2,
        "visible": asdict(visible),
        "batch_times": asdict(visible),
    }
    capture: dict[str, object] = {
        "state": "streaming",
        "changes": {name: {"c": 3, "u": 1} for name in names},
        "source_lsn": 900,
        "bytes_total": 10,
        "queued_bytes": 1,
        "reconnects": 1,
        "tables_waiting": {names[0]: {"message": "renamed", "remedy": "rename it back"}},
        "slot_retained_bytes": 100,
        "snapshot": {"rows": 1, "tables_done": 1},
    }
    parts = {
        "parts": {"capture": {"restarts": 1, "rss_bytes": 5}},
        "lease": {"takeovers": 1, "standbys": ["standby-b-7"]},
    }
    view = {"state": "live", "rows": 7, "state_bytes": 100, "restarts": 1}
    lags = {("redis", name): SinkLag(1, 2.5) for name in names}
    return Observation(
        at=1.0,
        capture=capture,
        apply={"sinks": {"redis": sink}},
        views={"views": {"totals": view}},
        daemon=parts,
        head=Lsn(800),
        positions={"redis": SinkPosition(Lsn(500))},
        sink_lags={"redis": SinkLag(300, 2.5)},
        table_lags=lags,
        view_lags={"totals": SinkLag(10, 0.5)},
        slot_room=5,
    )


def samples(text: str) -> set[str]:
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_the_text_is_what_prometheus_reads_and_holds_every_family() -> None:
    text = exposition(full(), FAMILIES)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    wanted = {one.name.removesuffix("_total") if one.kind == "counter" else one.name for one in FAMILIES}
    assert set(families) == wanted
    assert all(family.samples for family in families.values())


def test_the_documentation_is_made_from_the_families() -> None:
    assert document(FAMILIES) in _DOCS.read_text(encoding="utf-8")


def test_every_documented_name_is_exported_and_every_exported_one_documented() -> None:
    documented = set(re.findall(r"^\| `(millrace_\w+)`", _DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    exported = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples(exposition(full(), FAMILIES))}
    assert documented == exported


def test_names_end_in_their_unit() -> None:
    for family in FAMILIES:
        assert (family.kind == "counter") == family.name.endswith("_total")
    assert all(family.name.endswith("_seconds") for family in FAMILIES if family.kind == "histogram")


def test_an_empty_pipeline_is_measured_without_an_error() -> None:
    assert "millrace_ready 0" in exposition(Observation(), FAMILIES)


def test_a_thousand_tables_are_few_series_and_their_counts_are_not_lost() -> None:
    text = exposition(full(1000), FAMILIES)
    assert len(text.splitlines()) < 6 * MOST_TABLES
    applied = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "millrace_sink_changes_total"
    ]
    assert len(applied) == MOST_TABLES + 1
    assert sum(sample.value for sample in applied) == 5000
    assert any(sample.labels["table"] == OTHERS for sample in applied)


def test_a_tables_name_cannot_forge_a_line() -> None:
    seen = Observation(capture={"changes": {'a"} 1\nmillrace_ready 1\\': {"c": 1}}})
    (family,) = [
        family
        for family in text_string_to_metric_families(exposition(seen, FAMILIES))
        if family.name == "millrace_capture_changes"
    ]
    assert family.samples[0].labels["table"] == 'a"} 1\nmillrace_ready 1\\'


def test_the_histogram_counts_upwards_and_ends_with_everything() -> None:
    text = exposition(full(), FAMILIES)
    counts = [int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "visible_seconds_bucket" in line]
    assert counts == sorted(counts)
    assert counts[-1] == 3


# -- lag


def said(at: float, **facts: object) -> dict[str, object]:
    stamp = datetime.fromtimestamp(at, UTC).isoformat()
    return {"state": "streaming", "at": stamp, "watermark": 500, "source_lsn": 500, **facts}


def inputs(at: float, capture: dict[str, object], head: int = 500, reached: int = 500) -> LagInputs:
    return LagInputs(at, capture, Lsn(head), {"redis": Lsn(reached)}, {"redis": ["public.a", "public.b"]})


def test_an_idle_pipeline_that_holds_everything_is_not_behind() -> None:
    lags = Lags()
    for second in range(100):
        lags.update(inputs(_START + second, said(_START + second)))
    assert (lags.capture, lags.sinks["redis"]) == (SinkLag(), SinkLag())


def test_a_sink_that_stands_still_is_further_behind_each_second() -> None:
    lags = Lags()
    tables = {"public.a": {"lsn": 400, "at": datetime.fromtimestamp(_START, UTC).isoformat()}}
    found = []
    for second in (1, 10, 100):
        facts = said(_START + second, tables=tables, last_commit_at=tables["public.a"]["at"])
        lags.update(inputs(_START + second, facts, head=500, reached=200))
        found.append((lags.sinks["redis"].seconds, lags.tables["redis", "public.a"].seconds))
    assert found == [(1, 1), (10, 10), (100, 100)]
    assert lags.sinks["redis"].bytes == 300
    assert lags.tables["redis", "public.a"].bytes == 201


def test_a_sink_with_nothing_yet_is_not_behind_by_all_the_wal_there_ever_was() -> None:
    lags = Lags()
    for second, head in ((0, 500), (10, 520)):
        lags.update(inputs(_START + second, said(_START + second), head=head, reached=0))
    assert lags.sinks["redis"] == SinkLag(20, 10)


def test_a_table_that_has_everything_is_not_behind_though_its_neighbour_is() -> None:
    lags = Lags()
    stamp = datetime.fromtimestamp(_START, UTC).isoformat()
    tables = {"public.a": {"lsn": 400, "at": stamp}, "public.b": {"lsn": 100, "at": stamp}}
    lags.update(inputs(_START + 5, said(_START + 5, tables=tables), reached=200))
    assert lags.tables["redis", "public.a"].seconds == 5
    assert lags.tables["redis", "public.b"] == SinkLag()


def test_new_changes_do_not_make_an_old_lag_look_young() -> None:
    lags = Lags()
    for second in range(1, 60):
        stamp = datetime.fromtimestamp(_START + second, UTC).isoformat()
        facts = said(_START + second, tables={"public.a": {"lsn": 400 + second, "at": stamp}}, last_commit_at=stamp)
        lags.update(inputs(_START + second, facts, head=500 + second, reached=200))
    assert lags.tables["redis", "public.a"].seconds == 58
    assert lags.sinks["redis"].seconds == 58


def test_an_entry_without_rows_does_not_make_an_idle_pipeline_look_old() -> None:
    lags = Lags()
    old = datetime.fromtimestamp(_START - 1000, UTC).isoformat()
    lags.update(inputs(_START, said(_START, last_commit_at=old)))
    lags.update(inputs(_START + 1, said(_START + 1, last_commit_at=old), head=510))
    assert lags.sinks["redis"].seconds == 0
    lags.update(inputs(_START + 4, said(_START + 4, last_commit_at=old), head=510))
    assert lags.sinks["redis"].seconds == 3


def test_a_sink_that_follows_at_a_distance_is_that_far_behind() -> None:
    lags = Lags()
    for second in range(3000):
        stamp = datetime.fromtimestamp(_START + second, UTC).isoformat()
        facts = said(_START + second, last_commit_at=stamp, watermark=1000 + second, source_lsn=1000 + second)
        lags.update(inputs(_START + second, facts, head=1000 + second, reached=max(1000, 990 + second)))
        if second > 20:
            assert lags.sinks["redis"] == SinkLag(10, 9)


@pytest.mark.parametrize("facts", [{"state": "reconnecting"}, {"source_lsn": 900}])
def test_a_reader_that_is_behind_puts_every_sink_and_table_behind(facts: dict[str, object]) -> None:
    lags = Lags()
    lags.update(inputs(_START, said(_START)))
    for second in (10, 20):
        lags.update(inputs(_START + second, said(_START + second, **facts)))
    assert lags.capture.seconds == 20
    assert lags.sinks["redis"].seconds == 20
    assert lags.tables["redis", "public.a"].seconds == 20


def test_a_reader_that_is_silent_is_behind() -> None:
    lags = Lags()
    for second in range(60):
        lags.update(inputs(_START + second, said(_START)))
    assert lags.capture.seconds > 40


# -- when something is full


def test_a_disk_that_fills_has_a_time_and_one_that_does_not_has_none() -> None:
    filling, steady = DiskForecast(), DiskForecast()
    for second in range(0, 121, 10):
        filling.add(second, 1000 - second)
        steady.add(second, 1000)
    assert filling.seconds() == pytest.approx(880)
    assert steady.seconds() == float("inf")

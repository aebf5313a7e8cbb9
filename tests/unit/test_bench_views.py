"""The bench of views: its contenders compute the same, and its judgement finds what is wrong."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bench.views import consistency, quix, structured
from bench.views.consistency import Verdict, verdict
from bench.views.peers import PEERS, Arrivals, figures
from bench.views.run import merged
from bench.views.state import contender, events, in_arrow, run
from bench.views.state.measured import Settings
from bench.views.workloads import WORKLOADS


@pytest.mark.parametrize("job", run.JOBS)
def test_state_tables_give_the_right_result_with_any_batches_and_after_a_restart(job: str, tmp_path: Path) -> None:
    source = run._SOURCES[job](200)
    rows = pa.concat_tables([source.load(), *(source.changes(100) for _ in range(5))])
    right: Any = source.totals() if isinstance(source, events.Amounts) else source.pairs()
    settings = Settings(contender.ARROW, job, str(tmp_path / "batches"), str(tmp_path / "state"), cores=1, keep=True)
    number = events.write_batches(Path(settings.folder), rows.slice(0, 350), 45)
    found = in_arrow.run(settings)["kept"]
    events.write_batches(Path(settings.folder), rows.slice(350), 60, number)
    found += in_arrow.run(settings)["kept"]
    assert run.result(contender.ARROW, job, found) == right


def test_a_batch_of_changes_touches_no_row_twice() -> None:
    source = events.Orders(4_000)
    source.load()
    changes = source.changes(1_000).to_pydict()
    rows = list(zip(changes["order_id"], changes["item_id"], strict=True))
    assert len(rows) == len(set(rows)) == 1_000


def test_the_spread_of_runs_is_beside_each_median() -> None:
    runs = [{"cpu": cpu, "state": {"bytes": 7}} for cpu in (3, 1, 2)]
    assert run.spread_of(runs) == {"cpu": 2, "cpu_range": [1, 3], "state": {"bytes": 7}}


def test_a_wrong_total_and_a_missing_account_are_counted() -> None:
    assert verdict([(20_000, 20), (19_990, 20), (20_000, 19)]) == Verdict(3, 2, 19_990, 20_000)


def test_violations_are_those_of_the_views_and_of_the_first_query() -> None:
    found = {
        "millrace": {"total_balance": {"wrong": 0}, "half_balances": {"wrong": 1}},
        "textbook": {"last_balances": {"wrong": 4}, "differences": {"wrong": 5}},
    }
    assert consistency.violations(found) == {"millrace_violations": 1, "textbook_violations": 4}


def test_the_age_of_a_change_ends_with_the_first_result_that_is_as_new() -> None:
    arrivals = Arrivals()
    arrivals._steps = [(1_000_000, 1.5), (3_000_000, 3.25)]
    assert arrivals.ages([1_000_000, 2_000_000, 3_000_000, 4_000_000]) == [0.5, 1.25, 0.25]


def test_the_cost_of_a_peer_is_that_of_the_counted_changes() -> None:
    found = figures(1_000, {"seconds": 2.0, "cpu_seconds": 0.01, "share": 0.5})
    assert (found["events_per_s"], found["cpu_us_per_event"]) == (250, 20.0)


def test_new_figures_leave_those_of_other_kinds() -> None:
    earlier = {"kinds": {"joins": {"a": 1}, "windows": {"a": 1, "peers": {"x": 1}}}}
    found = {"kinds": {"windows": {"peers": {"y": 2}}}}
    assert merged(earlier, found) == {"kinds": {"joins": {"a": 1}, "windows": {"a": 1, "peers": {"x": 1, "y": 2}}}}


def test_every_peer_says_of_every_kind_what_it_cannot_express() -> None:
    names = {workload.name for workload in WORKLOADS}
    assert set(PEERS) == {"structured_streaming", "quix_streams"}
    for peer in (structured, quix):
        assert set(peer.LIMITS) == set(peer.KINDS) == names


class _State(dict[str, Any]):
    def set(self, key: str, value: object) -> None:
        self[key] = json.loads(json.dumps(value))


def test_the_documents_of_quix_streams_have_the_items_that_are_left() -> None:
    state = _State()
    order = {"table": "public.orders", "id": 1, "row": {"id": 1}, "ts_us": 1}
    items = [{"table": "public.items", "id": item, "row": {"id": item}, "ts_us": 2} for item in (5, 6)]
    assert quix.document(items[0], state) is None
    for change in (order, items[1], {**items[0], "row": None, "ts_us": 9}):
        found = quix.document(change, state)
    assert found == {"id": 1, "items": [{"id": 6}], "ts_us": 9}


def test_the_timelines_of_quix_streams_have_posts_for_each_follower() -> None:
    state = _State()
    follow = {"table": "public.follows", "row": {"follower": 3}, "old": None, "id": None, "ts_us": 1}
    post = {"table": "public.posts", "id": 8, "row": {"title": "x"}, "old": None, "ts_us": 2}
    assert list(quix.timeline(follow, state)) == []
    row = {"follower": 3, "post": "8", "title": "x", "deleted": False, "ts_us": 2}
    assert list(quix.timeline(post, state)) == [row]
    gone = {**follow, "row": None, "old": {"follower": 3}, "ts_us": 4}
    assert list(quix.timeline(gone, state)) == [{**row, "deleted": True, "ts_us": 4}]

"""Windows of random events against a slow, obvious computation: cut anywhere, restarted anywhere, late or not."""

import json
import random
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cdc.model import TableId
from tests.scenes.event_histories import (
    DAY,
    ORDERS,
    SCHEMA,
    Arrivals,
    Change,
    Event,
    Result,
    Windows,
    grouped,
    hopping,
    itself,
    log_rows,
    portions,
    random_changes,
    sessions,
    shown,
    sliding,
    tumbling,
    whole_time,
)
from tests.scenes.seeds import seeds
from views.catalog import Catalog
from views.dataflow.graph import Graph
from views.dataflow.output import Moment, changes
from views.plan import ViewPlan
from views.registry import plan_of, settings_kinds
from views.state import checkpoint

VIEW = TableId("view", "windows")
LATENESS, GRACE = 30, 120
COMPUTE = {"orders": "count(*)", "total": "sum(amount)"}
LARGEST = {"largest": "max(amount)"}
Compute = Callable[[Arrivals], Result]

KINDS: Mapping[str, tuple[dict[str, Any], Windows, Compute]] = {
    "tumbling": ({"tumbling": "1 minute"}, tumbling(60), grouped),
    "hopping": ({"hopping": "2 minutes", "every": "30 seconds"}, hopping(120, 30), grouped),
    "hopping with gaps": ({"hopping": "20 seconds", "every": "1 minute"}, hopping(20, 60), grouped),
    "session": ({"session": "40 seconds"}, itself, lambda arrivals: sessions(arrivals, 40)),
    "sliding": ({"sliding": "90 seconds"}, itself, lambda arrivals: sliding(arrivals, 90)),
    "all": ({"all": True}, whole_time, grouped),
}


def planned(window: Mapping[str, Any], **settings: Any) -> ViewPlan:
    """A view of orders by region."""
    facts: dict[str, Any] = {
        "kind": "windows",
        "name": "windows",
        "source": str(ORDERS),
        "time": "at",
        "lateness": "30 seconds",
    }
    facts |= {"window": dict(window), "group_by": {"region": "region"}, "compute": {**COMPUTE, **LARGEST}}
    model = settings_kinds()["windows"].model_validate({**facts, **settings})
    return plan_of(model, Catalog({ORDERS: SCHEMA}))


def restarted(plan: ViewPlan, graph: Graph, folder: Path) -> Graph:
    """The graph of another process, from a checkpoint of this one."""
    graph.care.forget()
    checkpoint.save(folder, graph.tables, {})
    again = plan.graph()
    checkpoint.load(folder, again.tables)
    return again


def followed(
    plan: ViewPlan, arrivals: Arrivals, compute: Compute, history: list[Change], rng: random.Random, folder: Path
) -> dict[str, dict[str, Any]]:
    """Run a view over a history and compare it after each batch; returns the first final row of each window."""
    graph, rows = plan.graph(), dict[str, str]()
    finals: dict[str, dict[str, Any]] = {}
    key = [column.name for column in plan.schema.key]
    closes = "once it has closed" in " ".join(node.text for node in graph.nodes)
    for batch in portions(history, rng):
        graph.begin(0, 1)
        for row in changes(VIEW, graph.step(log_rows(batch)), Moment(batch[-1].lsn, DAY)).to_pylist():
            assert row["before"] == rows.get(row["key"])
            rows.pop(row["key"], None)
            if row["after"] is not None:
                rows[row["key"]] = row["after"]
                facts = json.loads(row["after"])
                if facts["final"]:
                    finals.setdefault(row["key"], {name: facts[name] for name in COMPUTE})
        arrivals.take(batch)
        expected = {
            each: value
            for each, value in compute(arrivals).items()
            if not closes or int(str(value[0])) <= arrivals.watermark
        }
        assert dict(shown(json.loads(row, parse_float=str), key) for row in rows.values()) == expected
        if rng.random() < 0.2:
            graph = restarted(plan, graph, folder)
    return finals


@pytest.mark.parametrize("seed", seeds(1, 40))
@pytest.mark.parametrize("late", ["correct", "drop"])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_those_of_the_rows_that_were_in_time_whatever_the_batches_are(
    kind: str, late: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    window, windows, compute = KINDS[kind]
    history = random_changes(rng, 40)
    for emit in ("change", "both", "close"):
        plan = planned(window, late=late, correct_for="2 minutes", emit=emit)
        finals = []
        for run in range(2):
            arrivals = Arrivals(windows, LATENESS, GRACE if late == "correct" else 0)
            folder = tmp_path / f"{emit}-{run}"
            finals.append(followed(plan, arrivals, compute, history, rng, folder))
        if late == "drop" and emit != "change":
            assert finals[0] == finals[1], "windows closed with other values"


def test_ticks_close_windows_while_no_row_comes() -> None:
    plan = planned({"tumbling": "1 minute"}, emit="close", idle="10 seconds", lateness="0 seconds")
    graph = plan.graph()
    first = [Change(10, 1, Event(1, 5, "n", "1.50"))]
    graph.begin(0, 1)
    assert changes(VIEW, graph.step(log_rows(first)), Moment(10, DAY)).num_rows == 0
    graph.begin(0, 1)
    early = graph.step(log_rows([Change(20, tick=15)]))
    assert early.num_rows == 0, "a row was committed at second 10, and the tick is not yet 10 seconds later"
    graph.begin(0, 1)
    (row,) = changes(VIEW, graph.step(log_rows([Change(30, tick=71)])), Moment(30, DAY)).to_pylist()
    facts = json.loads(row["after"])
    assert facts["final"] is True
    assert facts["watermark"] == (DAY + timedelta(seconds=61)).isoformat().replace("+00:00", "Z")


def test_rows_of_the_first_snapshot_are_never_late() -> None:
    plan = planned({"tumbling": "1 minute"}, late="drop", lateness="0 seconds")
    graph = plan.graph()
    graph.begin(100, 100)
    rows = [Change(10, 1, Event(1, 1000, "n", "1.50")), Change(20, 2, Event(2, 5, "n", "2.25"))]
    shown_rows = changes(VIEW, graph.step(log_rows(rows)), Moment(20, DAY)).to_pylist()
    assert len(shown_rows) == 2
    graph.begin(100, 100)
    late = [Change(110, 3, Event(3, 6, "n", "10.00"))]
    assert changes(VIEW, graph.step(log_rows(late)), Moment(110, DAY)).num_rows == 0


def test_what_was_closed_for_good_is_forgotten() -> None:
    plan = planned({"tumbling": "1 minute"}, late="drop")
    graph = plan.graph()
    for number in range(1, 61):
        ids = range(number * 1000, number * 1000 + 1000)
        events = [Change(number, each, Event(each, number * 60, "n", "1.50")) for each in ids]
        graph.begin(0, 1)
        graph.step(log_rows(events))
        graph.care.forget()
    stored = {name: table.entries for name, table in graph.tables.items() if "output" not in name}
    assert max(stored.values()) < 45_000, stored


@pytest.mark.parametrize("seed", seeds(1, 40))
def test_a_state_that_was_forgotten_changes_nothing_later(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("views.state.table._FORGOTTEN", 0)
    rng = random.Random(seed)
    for kind, (window, windows, compute) in KINDS.items():
        arrivals = Arrivals(windows, LATENESS, 0)
        followed(planned(window, late="drop"), arrivals, compute, random_changes(rng, 40), rng, tmp_path / kind)

"""The bench's own arithmetic: who is measured, how much, and how they compare."""

import json
import math
from pathlib import Path

import pytest

from bench import row_path, snapshot
from bench.capture import run
from bench.capture.run import Sizes
from bench.comparison import RESULTS, Comparison, medians
from bench.scale.delay_proxy import RequestEnd, http_request, redis_command
from bench.sinks import delta_batches

both = pytest.mark.parametrize("comparison", [run.COMPARISON, snapshot.COMPARISON], ids=lambda one: one.name)


@both
def test_without_a_choice_everybody_is_measured_but_the_variants(comparison: Comparison) -> None:
    assert comparison.chosen("") == list(comparison.contenders)


@both
def test_chosen_contenders_run_in_the_usual_order(comparison: Comparison) -> None:
    every = [*comparison.contenders, *comparison.variants]
    assert comparison.chosen(f"{every[-1]}, {every[0]}") == [every[0], every[-1]]


@both
def test_an_unknown_contender_is_refused_by_name(comparison: Comparison) -> None:
    with pytest.raises(SystemExit, match=f"'maxwell' is none of {comparison.contenders[0]}, "):
        comparison.chosen("maxwell")


def test_sizes_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGES", "7")
    monkeypatch.setenv("TPS", "2.5")
    assert Sizes.from_environment() == Sizes(changes=7, tps=2.5)


@both
def test_ratios_are_to_the_limit_and_to_the_peer(comparison: Comparison) -> None:
    figures = (f"{comparison.unit}s_per_s", f"cpu_us_per_{comparison.unit}", "peak_rss_mb")
    found = {
        comparison.limit: dict(zip(figures, (100.0, 2.0, 10.0), strict=True)),
        "millrace_segments": dict(zip(figures, (80.0, 5.0, 250.0), strict=True)),
        "debezium_kafka": dict(zip(figures, (20.0, 80.0, 1000.0), strict=True)),
    }
    assert comparison.ratios(found)["millrace_segments"] == {
        f"rate_of_{comparison.limit}": 0.8,
        "speed_of_debezium": 4.0,
        "debezium_cpu": 16.0,
        "debezium_memory": 4.0,
    }


@both
def test_published_ratios_follow_from_the_published_figures(comparison: Comparison) -> None:
    published = json.loads((RESULTS / f"{comparison.name}.json").read_text())
    for name, ratios in comparison.ratios(published["contenders"]).items():
        for ratio, value in ratios.items():
            assert math.isclose(published["ratios"][name][ratio], value, abs_tol=0.02), (name, ratio)


def test_a_batch_is_measured_by_the_kind_of_its_keys_and_its_size(tmp_path: Path) -> None:
    found = delta_batches.measure((2_000,), (10, 100), runs=1, folder=tmp_path)["2000"]
    assert {kind: list(sizes) for kind, sizes in found.items()} == {"recent": ["10", "100"], "spread": ["10", "100"]}
    assert all(
        cost["seconds"] > 0 and cost["cpu_us_per_change"] > 0 for each in found.values() for cost in each.values()
    )


def test_every_step_of_the_row_path_is_measured() -> None:
    found = row_path.measure(1_000, runs=1)
    assert [step.partition(":")[0] for step in found] == [
        "decode", "assemble", "append", "read", "pack", "unpack", "fold", "type", "apply",
    ]  # fmt: skip
    assert all(cpu >= 0 for cpu in found.values())


COMMANDS = [
    b"*1\r\n$4\r\nPING\r\n",
    b"*3\r\n$3\r\nSET\r\n$4\r\n$1\r\n\r\n$0\r\n\r\n",
    b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n",
]
REQUESTS = [
    b"GET / HTTP/1.1\r\nhost: here\r\n\r\n",
    b"POST /a/_bulk HTTP/1.1\r\nContent-Length: 9\r\nhost: here\r\n\r\n\r\n\r\n{...}",
    b"HEAD /a HTTP/1.1\r\ncontent-length:0\r\n\r\n",
]


@pytest.mark.parametrize(("end_of", "requests"), [(redis_command, COMMANDS), (http_request, REQUESTS)])
@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_the_delay_proxy_finds_each_request_however_it_arrives(
    end_of: RequestEnd, requests: list[bytes], piece: int
) -> None:
    whole, arrived = b"".join(requests), bytearray()
    found: list[bytes] = []
    for start in range(0, len(whole), piece):
        arrived += whole[start : start + piece]
        while end := end_of(arrived):
            found.append(bytes(arrived[:end]))
            del arrived[:end]
    assert found == requests
    assert not arrived


def test_a_run_that_was_disturbed_does_not_move_the_median_of_a_figure() -> None:
    runs = [
        {"cores": cores, "latency": {"p50": p50}, "at": at}
        for cores, p50, at in ((1, 40, "a"), (9, 900, "b"), (2, 50, "c"))
    ]
    assert medians(runs) == {"cores": 2, "latency": {"p50": 50}, "at": "c"}

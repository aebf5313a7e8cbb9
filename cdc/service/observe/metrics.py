"""Prometheus's text format. Pure. The metrics themselves are in `cdc.service.observe.metric_families`.

Promise: the number of series is bounded. Tables beyond the first MOST_TABLES share one label.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cdc.service.observe.observer import Observation

OTHERS = "(others)"
MOST_TABLES = 200
"""Tables of a per-table metric: thousands of series per scrape slow Prometheus down."""

Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Buckets:
    """One histogram: the number of durations in each bucket; the last bucket has no upper bound."""

    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `read` gives its samples, in the order of its labels."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    read: Callable[[Observation], Iterable[Sample | Buckets]]


def exposition(seen: Observation, families: Iterable[Family]) -> str:
    """All families, in Prometheus's text format."""
    return "".join(f"{line}\n" for family in families for line in _lines(family, seen))


def _lines(family: Family, seen: Observation) -> Iterator[str]:
    yield f"# HELP {family.name} {family.meaning}"
    yield f"# TYPE {family.name} {family.kind}"
    plain: list[Sample] = []
    for item in family.read(seen):
        if isinstance(item, Buckets):
            yield from _histogram(family, item)
        else:
            plain.append(item)
    for labels, value in _bounded(family, plain):
        yield f"{family.name}{_braces(family.labels, labels)} {_number(value)}"


def _histogram(family: Family, item: Buckets) -> Iterator[str]:
    up_to = 0
    names = (*family.labels, "le")
    for bound, count in zip((*item.bounds, math.inf), item.counts, strict=True):
        up_to += count
        yield f"{family.name}_bucket{_braces(names, (*item.labels, _number(bound)))} {up_to}"
    yield f"{family.name}_sum{_braces(family.labels, item.labels)} {_number(item.total)}"
    yield f"{family.name}_count{_braces(family.labels, item.labels)} {up_to}"


def _bounded(family: Family, samples: list[Sample]) -> Iterable[Sample]:
    """Merge tables beyond the first MOST_TABLES into one: the sum for a counter, else the maximum."""
    if "table" not in family.labels:
        return samples
    at = family.labels.index("table")
    kept = set(sorted({labels[at] for labels, _ in samples})[:MOST_TABLES])
    merged: dict[tuple[str, ...], float] = {}
    join = sum if family.kind == "counter" else max
    for labels, value in samples:
        shown = labels if labels[at] in kept else (*labels[:at], OTHERS, *labels[at + 1 :])
        merged[shown] = join((merged[shown], value)) if shown in merged else value
    return merged.items()


def _braces(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = ",".join(f'{name}="{_label(value)}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(round(value, 6))


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def document(families: Iterable[Family]) -> str:
    """The families as a Markdown table."""
    rows = [f"| `{one.name}` | {one.kind} | {', '.join(one.labels)} | {one.meaning} |" for one in families]
    return "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"


def numbers(facts: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """The numbers among some facts, by name."""
    for name, value in sorted(facts.items()):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value

"""Where the state of views lives, decided by measurement: `make bench-view-state` writes bench/results/view-state.json.

    python -m bench.views.state.run        (KEYS, EVENTS, BATCHES, RUNS, CONTENDERS, PARTS, OUT from the environment)

Two jobs, sum and count per key with corrections (`totals`) and items with their orders (`pairs`), by four contenders:
Spark's built-in operators, transformWithState by rows and by pandas, and the state tables of `views.state`.

`correctness`: the same changes in other batches, after a restart, and after a commit was lost. `limits`: what Spark's
operators refuse or drop. `cost`: with KEYS rows of state, BATCHES batches of EVENTS changes, of which the first two do
not count; then the first batch of a second process, which has only just run the same job on little data; the state read
as of an earlier batch. `spread`: the same with the smallest of KEYS and one core. `history`: the cost of a batch as
changes of few keys add up. Figures are medians of RUNS runs, with their range. CPU is that of the driver, its JVM and
all Python processes. Parts and contenders that are not named keep their results.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench import cpu_meter
from bench.comparison import RESULTS, machine, write
from bench.environment import folder as bench_folder
from bench.views.state import events
from bench.views.state.contender import ARROW, CONTENDERS
from bench.views.state.events import Amounts, Orders
from bench.views.state.measured import Figures, Settings
from bench.views.state.spark_jobs import current_pairs

JOBS = ("totals", "pairs")
_SOURCES: Mapping[str, Callable[[int], Amounts | Orders]] = {"totals": Amounts, "pairs": Orders}
_UNCOUNTED = 2
_RESTART_EVENTS = 100
_ERASED = 7
_HISTORY_KEYS = 8_000
"""Few: each row changes forty times. The first ten batches are not counted, since Spark's JVM compiles in them."""
_MOST_KEYS = {"by_pandas": 100_000}
"""A millisecond of CPU for each row that is loaded: a million rows would take as long as all other contenders."""


def _number(name: str, usual: int) -> int:
    return int(os.environ.get(name, usual))


def sizes() -> list[int]:
    """KEYS."""
    return [int(size) for size in os.environ.get("KEYS", "100000 1000000 3000000").replace(",", " ").split()]


def chosen() -> list[str]:
    """CONTENDERS."""
    return os.environ.get("CONTENDERS", " ".join(CONTENDERS)).replace(",", " ").split()


def measured(settings: Settings) -> Figures:
    """Run one contender in its own process."""
    command = [sys.executable, "-m", "bench.views.state.contender", json.dumps(asdict(settings))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=7200)
    if done.returncode:
        raise RuntimeError(f"{settings.contender} failed on {settings.job}: {done.stderr[-2000:]}")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


# -- correctness


def correctness(home: Path, name: str) -> Figures:
    """By job: whether the result is right, and whether it depends on cuts, a restart, a lost commit."""
    found: Figures = {}
    for job in JOBS:
        source = _SOURCES[job](2_000)
        rows = pa.concat_tables([source.load(), *(source.changes(1_000) for _ in range(10))])
        right: Mapping[Any, Any] = source.totals() if isinstance(source, Amounts) else source.pairs()
        found[job] = _compared(name, job, rows, right, home / f"{name}-{job}")
    return found


def _compared(name: str, job: str, rows: pa.Table, right: Mapping[Any, Any], home: Path) -> Figures:
    large, small = (Settings(name, job, str(home / cut), str(home / f"state-{cut}"), keep=True) for cut in ("a", "b"))
    events.write_batches(Path(large.folder), rows, 3_000)
    whole = measured(large)["kept"]
    half, last = (rows.num_rows * part // 10 // events.PER_TRANSACTION * events.PER_TRANSACTION for part in (5, 9))
    number, parts = 0, []
    for begin, end in ((0, half), (half, last)):
        number = events.write_batches(Path(small.folder), rows.slice(begin, end - begin), 700, number)
        parts += measured(small)["kept"]
    shutil.copytree(small.home, home / "before")
    events.write_batch(Path(small.folder), number, rows.slice(last))
    parts += measured(small)["kept"]
    _lose_commit(small, number, home / "before")
    again = measured(small)["kept"]
    return {
        "right": result(name, job, whole) == right,
        "right_with_other_batches_and_restarts": result(name, job, parts) == right,
        "right_after_a_lost_commit": bool(again) and result(name, job, [*parts, *again]) == right,
        "emitted_rows": [len(whole), len(parts)],
        "same_rows_emitted_with_other_batches": emitted(whole) == emitted(parts),
    }


def _lose_commit(settings: Settings, last: int, before: Path) -> None:
    """As if the process had ended after the last batch was written, and before that was recorded."""
    if settings.contender == ARROW:
        shutil.rmtree(settings.home)
        before.rename(settings.home)
    else:
        (Path(settings.home) / "commits" / str(last)).unlink()
        (Path(settings.home) / "commits" / f".{last}.crc").unlink(missing_ok=True)


def result(name: str, job: str, rows: Iterable[Mapping[str, Any]]) -> dict[Any, Any]:
    """What a reader that keeps the last row of each key ends with."""
    if job == "totals":
        columns = ("sum(amount)", "sum(one)") if name == "built_in" else ("sum", "count")
        totals = {row["key"]: tuple(row[column] for column in columns) for row in rows}
        return {key: total for key, total in totals.items() if total[1]}
    if name == "built_in":
        return current_pairs(rows)
    pairs = {(row["order_id"], row["item_id"]): row for row in rows}
    return {pair: (row["order_value"], row["item_value"]) for pair, row in pairs.items() if row["live"]}


def emitted(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The emitted rows without the numbers of their batches."""
    return sorted(tuple(value for name, value in row.items() if name != "batch") for row in rows)


# -- cost


def cost(home: Path, name: str) -> Figures:
    """By job and rows of state."""
    fitting = [keys for keys in sizes() if keys <= _MOST_KEYS.get(name, keys)]
    return {job: {str(keys): _cost(home, name, job, keys, 2) for keys in fitting} for job in JOBS}


def spread(home: Path, name: str) -> Figures:
    """By job, with the smallest state: one core and two."""
    return {job: {str(cores): _cost(home, name, job, min(sizes()), cores) for cores in (1, 2)} for job in JOBS}


def _cost(home: Path, name: str, job: str, keys: int, cores: int) -> Figures:
    made = _inputs(home, job, keys)
    runs = [_one_cost(Path(each), made, Settings(name, job, "", "", cores)) for each in _folders(home)]
    return spread_of(runs)


def _folders(home: Path) -> Iterable[str]:
    for _ in range(_number("RUNS", 3)):
        with tempfile.TemporaryDirectory(dir=home) as each:
            yield each


def _inputs(home: Path, job: str, keys: int) -> Path:
    """Made once: `main` is the load and the batches, `after` the batch of the second process, `warm` a small one."""
    made = home / f"input-{job}-{keys}"
    if not made.exists():
        source, small = _SOURCES[job](keys), _SOURCES[job](2_000)
        events.write_batch(made / "main", 0, source.load())
        last = _UNCOUNTED + _number("BATCHES", 10)
        for number in range(1, last + 1):
            events.write_batch(made / "main", number, source.changes(_number("EVENTS", 20_000)))
        events.write_batch(made / "after", last + 1, source.changes(_RESTART_EVENTS))
        for number, rows in enumerate([small.load(), small.changes(500), small.changes(500)]):
            events.write_batch(made / "warm", number, rows)
    return made


def _one_cost(home: Path, made: Path, settings: Settings) -> Figures:
    batches = home / "batches"
    batches.mkdir()
    _link(made / "main", batches)
    own = Settings(settings.contender, settings.job, str(batches), str(home / "state"), settings.cores)
    first = measured(own)
    _link(made / "after", batches)
    second = measured(
        Settings(own.contender, own.job, own.folder, own.home, own.cores, False, str(made / "warm"), _ERASED)
    )
    marks = first["marks"]
    counted = (len(marks) - 1 - _UNCOUNTED) * _number("EVENTS", 20_000)
    begun, ended = marks[_UNCOUNTED], marks[-1]
    return {
        "events_per_s": round(counted / (ended["monotonic"] - begun["monotonic"])),
        "cpu_us_per_event": round((ended["cpu"] - begun["cpu"]) / counted * 1e6, 2),
        "load_cpu_us_per_row": round((marks[0]["cpu"] - first["start"]["cpu"]) / _loaded(made) * 1e6, 2),
        "recovery": {
            "seconds": round(second["marks"][0]["monotonic"] - second["start"]["monotonic"], 3),
            "cpu_seconds": round(second["marks"][0]["cpu"] - second["start"]["cpu"], 3),
        },
        "state": second["state"],
        "peak_rss_mb": first["peak_rss_mb"],
        "load": cpu_meter.load(),
    }


def _link(made: Path, folder: Path) -> None:
    for path in made.iterdir():
        (folder / path.name).hardlink_to(path)


def _loaded(made: Path) -> int:
    return events.read_batch(made / "main", 0).num_rows


def history(home: Path, name: str) -> Figures:
    """By job: CPU per event of the first and of the last batches, while the keys stay the same."""
    count, size = _number("HISTORY_BATCHES", 60), 5_000
    found: Figures = {}
    for job in JOBS:
        source = _SOURCES[job](_HISTORY_KEYS)
        with tempfile.TemporaryDirectory(dir=home) as own:
            batches = Path(own) / "batches"
            events.write_batch(batches, 0, source.load())
            for number in range(1, count + 1):
                events.write_batch(batches, number, source.changes(size))
            marks = measured(Settings(name, job, str(batches), f"{own}/state"))["marks"]
        found[job] = {
            "changes": count * size,
            "cpu_us_per_event_first": _between(marks, 10, 20, size),
            "cpu_us_per_event_last": _between(marks, len(marks) - 11, len(marks) - 1, size),
        }
    return found


def _between(marks: Sequence[Figures], begin: int, end: int, size: int) -> float:
    used: float = marks[end]["cpu"] - marks[begin]["cpu"]
    return round(used / ((end - begin) * size) * 1e6, 2)


def spread_of(runs: Sequence[Mapping[str, Any]]) -> Figures:
    """Of each figure the median of the runs and, if there are several, its range, at any depth."""
    found: Figures = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs]
        if isinstance(first, Mapping):
            found[name] = spread_of(values)
        else:
            found[name] = statistics.median(values)
            if len(values) > 1 and min(values) != max(values):
                found[f"{name}_range"] = [min(values), max(values)]
    return found


# -- limits


def limits(home: Path) -> Figures:
    """See `bench.views.state.limits`."""
    source = Amounts(20_000)
    rows = pa.concat_tables([source.load(), *(source.changes(5_000) for _ in range(40))])
    for size in (rows.num_rows, 20_000, 2_000):
        events.write_batches(home / "limits" / str(size), rows, size)
    command = [sys.executable, "-m", "bench.views.state.limits", str(home / "limits")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=1800)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


PARTS: Mapping[str, Callable[[Path, str], Figures]] = {
    "correctness": correctness,
    "spread": spread,
    "history": history,
    "cost": cost,
}


def main() -> None:
    """Measure the chosen parts of each chosen contender, and write the results after each."""
    path = Path(os.environ.get("OUT") or RESULTS / "view-state.json")
    results: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="state-", dir=bench_folder()) as home:
        for part in os.environ.get("PARTS", " ".join(("limits", *PARTS))).split():
            if part == "limits":
                _keep(path, results, [part], limits(Path(home)))
                continue
            for name in chosen():
                _keep(path, results, [part, name], PARTS[part](Path(home), name))


def _keep(path: Path, results: Figures, place: Sequence[str], found: Figures) -> None:
    """Put figures in their place, with how they were measured, and write all."""
    *outer, last = place
    told = {**machine(), "load": cpu_meter.load(), "runs": _number("RUNS", 3), "events": _number("EVENTS", 20_000)}
    for root, value in ((results, found), (results.setdefault("measured", {}), told)):
        inner = root
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[last] = value
    write(path, results)
    print(" ".join(place), json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

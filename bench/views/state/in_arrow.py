"""The contender of the bake-off with sorted runs: each worker process has some partitions of the state."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from bench.views.state import events
from bench.views.state.arrow_jobs import Emitted, Pairs, Totals
from bench.views.state.measured import COLUMNS, PARTITIONS, Figures, Mark, Settings, answer

_JOBS = {"totals": Totals, "pairs": Pairs}
_open: dict[tuple[str, int], Totals | Pairs] = {}
"""In a worker process: the partitions that it has opened, by their home and number."""


def run(settings: Settings) -> Figures:
    """Process the batches that the state does not have yet."""
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1)) for _ in range(settings.cores)]
        if settings.warm:
            _processed(pools, settings, settings.warm, f"{settings.home}-warm")
        start = Mark.now()
        marks, kept = _processed(pools, settings, settings.folder, settings.home)
        state = pools[0].submit(_inspected, settings).result() if settings.warm else {}
        return answer(start, marks, kept, state)


def _processed(
    pools: list[ProcessPoolExecutor], settings: Settings, folder: str, home: str
) -> tuple[list[Mark], list[Figures]]:
    marks: list[Mark] = []
    kept: list[Figures] = []
    for number in events.numbers(Path(folder)):
        calls = [
            pool.submit(_apply, settings.job, home, tuple(range(first, PARTITIONS, len(pools))), folder, number)
            for first, pool in enumerate(pools)
        ]
        emitted = list(chain.from_iterable(call.result() for call in calls))
        if emitted:
            marks.append(Mark.now())
        if settings.keep:
            kept += chain.from_iterable(_rows(number, settings.job, each) for each in emitted)
    return marks, kept


def _apply(job: str, home: str, partitions: tuple[int, ...], folder: str, number: int) -> list[Emitted]:
    for partition in partitions:
        if (home, partition) not in _open:
            _open[home, partition] = _JOBS[job](Path(home), partition, PARTITIONS)
    behind = [_open[home, partition] for partition in partitions if _open[home, partition].position < number]
    rows = events.read_batch(Path(folder), number) if behind else None
    return [each.apply(number, rows) for each in behind]


def _rows(number: int, job: str, emitted: Emitted) -> list[Figures]:
    names = ("lsn", *COLUMNS["totals"]) if job == "totals" else COLUMNS["pairs"]
    rows = zip(*(column.tolist() for column in emitted.columns), strict=True)
    return [{"batch": number, **dict(zip(names, row, strict=True))} for row in rows]


def _inspected(settings: Settings) -> Figures:
    """The state as of the batch before the last, of the partitions of the first worker; and a key erased."""
    mine = [each for (home, _), each in _open.items() if home == settings.home]
    begun = Mark.now()
    rows = sum(len(each.main.as_of(each.position - 1)) for each in mine)
    read = {"rows": rows, "partitions": len(mine), **Mark.now().since(begun)}
    runs, size = (sum(each) for each in zip(*(each.main.size() for each in mine), strict=True))
    begun = Mark.now()
    erased = sum(each.main.erase(settings.erase) for each in mine) if settings.erase else 0
    return {
        "as_of_earlier_batch": read,
        "runs": runs,
        "bytes": size,
        "erase_key": {"files_written": erased, **Mark.now().since(begun)},
    }

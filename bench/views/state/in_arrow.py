"""The contender of the bake-off with state tables: each worker process has some partitions of the state."""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from bench.views.state import events
from bench.views.state.arrow_jobs import Emitted, Pairs, StoredTables, Totals
from bench.views.state.measured import COLUMNS, PARTITIONS, Figures, Mark, Settings, answer

_JOBS: Mapping[str, type[Totals] | type[Pairs]] = {"totals": Totals, "pairs": Pairs}
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
    behind = [each for each in (_opened(job, home, one) for one in partitions) if each.stored.position < number]
    if not behind:
        return []
    rows = events.read_batch(Path(folder), number)
    return [each.apply(number, rows) for each in behind]


def _opened(job: str, home: str, partition: int) -> Totals | Pairs:
    if (home, partition) not in _open:
        kind: type[Totals] | type[Pairs] = _JOBS[job]
        _open[home, partition] = kind(_stored(job, home, partition), partition, PARTITIONS)
    return _open[home, partition]


def _stored(job: str, home: str, partition: int) -> StoredTables:
    return StoredTables(Path(home) / f"state-{partition}", _JOBS[job].columns)


def _rows(number: int, job: str, emitted: Emitted) -> list[Figures]:
    names = ("lsn", *COLUMNS["totals"]) if job == "totals" else COLUMNS["pairs"]
    rows = zip(*(column.tolist() for column in emitted.columns), strict=True)
    return [{"batch": number, **dict(zip(names, row, strict=True))} for row in rows]


def _inspected(settings: Settings) -> Figures:
    """The whole state as of the last checkpoint, of the partitions of the first worker; and a key erased."""
    mine = [number for home, number in _open if home == settings.home]
    begun = Mark.now()
    again = [_stored(settings.job, settings.home, number) for number in mine]
    rows = sum(piece.num_rows for each in again for piece in each.tables["main"].scan())
    read = {"rows": rows, "partitions": len(mine), **Mark.now().since(begun)}
    stored = [_open[settings.home, number].stored for number in mine]
    runs, size = (sum(each) for each in zip(*(each.files() for each in stored), strict=True))
    begun = Mark.now()
    for each in stored:
        each.erase(settings.erase)
    return {"read": read, "runs": runs, "bytes": size, "erase_key": Mark.now().since(begun)}

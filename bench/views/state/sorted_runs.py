"""A keyed table of state as immutable sorted runs: the prototype behind the decision on where the state of views lives.

A run is an Arrow file, mapped into memory, sorted by the hash of the key. Lookups are binary searches over whole
batches of keys. A manifest names the runs, newest last, and the position of the input that they contain: renaming it is
the commit. Runs of similar size are merged. A manifest is kept for a number of commits, so that the state can be
read as of an earlier position. Keys are 64-bit integers, of which the hash is a permutation: no two share a hash.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.arrays import Bools, Ints
from cdc.durable_files import replace, sync_written

Hashes = npt.NDArray[np.uint64]
_FAN_IN = 4
_SMALLEST = 16_384
"""Runs up to this size are in one tier: without it, single-row commits would be merged one by one."""
_KEPT_MANIFESTS = 20
_FIXED = ("hash", "key", "sub", "live")


def hashed(keys: Ints) -> Hashes:
    """The finaliser of splitmix64: neighbouring keys are spread over the whole range."""
    mixed: Hashes = keys.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of state, column by column. `sub` tells the rows of one key apart; `live` 0 is a deleted row."""

    key: Ints
    sub: Ints
    live: Ints
    values: tuple[Ints, ...]

    def take(self, at: Ints | Bools) -> "Rows":
        """Some of the rows."""
        return Rows(self.key[at], self.sub[at], self.live[at], tuple(each[at] for each in self.values))

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True, slots=True)
class Run:
    """One file; its columns are views of the mapped file."""

    name: str
    hash: Hashes
    rows: Rows

    @property
    def tier(self) -> int:
        """Runs of one tier are merged together."""
        return max(0, int(math.log(max(1, len(self.hash)) / _SMALLEST, _FAN_IN)))


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows of the parts, in their order."""
    columns = zip(*(part.values for part in parts), strict=True)
    return Rows(
        np.concatenate([part.key for part in parts]),
        np.concatenate([part.sub for part in parts]),
        np.concatenate([part.live for part in parts]),
        tuple(np.concatenate(column) for column in columns),
    )


def newest(rows: Rows) -> Rows:
    """The last row of each key and sub."""
    order = np.lexsort((rows.sub, rows.key))
    last = np.ones(len(order), np.bool_)
    key, sub = rows.key[order], rows.sub[order]
    last[:-1] = (key[1:] != key[:-1]) | (sub[1:] != sub[:-1])
    return rows.take(order[last])


class SortedRuns:
    """The table in a folder. One writer; `commit` is the only change."""

    def __init__(self, folder: Path, values: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._values = folder, values
        self.position, self._runs = self._read(self._newest_manifest())

    def find(self, keys: Ints) -> Rows:
        """The live rows of these distinct keys."""
        probes = np.sort(hashed(keys))
        found = [run.rows.take(_matches(run.hash, probes)) for run in self._runs]
        rows = newest(joined(found)) if found else _none(self._values)
        return rows.take(rows.live == 1)

    def commit(self, rows: Rows, position: int) -> None:
        """Add the newest rows of some keys, and move to a position: all or nothing, durable on return."""
        runs = [*self._runs, self._write(rows, f"run-{position}.arrow")] if len(rows) else self._runs
        self._runs = self._merged(runs, position)
        self.position = position
        manifest = json.dumps({"position": position, "runs": [run.name for run in self._runs]})
        replace(self._folder / f"manifest-{position:020d}.json", manifest.encode())
        self._expire()

    def as_of(self, position: int) -> Rows:
        """All live rows as of the newest kept manifest that is not beyond a position."""
        names = [path for path in self._manifests() if int(path.stem.partition("-")[2]) <= position]
        if not names:
            raise LookupError(f"no manifest at or before {position} is kept")
        rows = newest(joined([run.rows for run in self._read(names[-1])[1]]))
        return rows.take(rows.live == 1)

    def erase(self, key: int) -> int:
        """Write every file again that contains the key, also those of earlier positions; returns their number."""
        erased = 0
        for path in self._folder.glob("run-*.arrow"):
            run = self._open(path.name)
            keep = run.rows.key != key
            if not keep.all():
                self._write(run.rows.take(keep), path.name)
                erased += 1
        self._runs = [self._open(run.name) for run in self._runs]
        return erased

    def size(self) -> tuple[int, int]:
        """Runs, and bytes of all files."""
        return len(self._runs), sum(path.stat().st_size for path in self._folder.iterdir())

    def _merged(self, runs: Sequence[Run], position: int) -> list[Run]:
        left = list(runs)
        while len(left) >= _FAN_IN and len({run.tier for run in left[-_FAN_IN:]}) == 1:
            rows = newest(joined([run.rows for run in left[-_FAN_IN:]]))
            if len(left) == _FAN_IN:
                rows = rows.take(rows.live == 1)  # nothing older: a deleted row hides nothing
            left[-_FAN_IN:] = [self._write(rows, f"run-{position}-{len(left)}.arrow")]
        return left

    def _write(self, rows: Rows, name: str) -> Run:
        hashes = hashed(rows.key)
        order = np.argsort(hashes, kind="stable")
        ordered = rows.take(order)
        columns = [hashes[order], ordered.key, ordered.sub, ordered.live, *ordered.values]
        table = pa.table(columns, names=[*_FIXED, *(f"value{number}" for number in range(self._values))])
        aside = self._folder / f".{name}"
        with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=max(1, len(rows)))
        sync_written(aside)
        aside.replace(self._folder / name)
        return self._open(name)

    def _open(self, name: str) -> Run:
        batches = pa.ipc.open_file(pa.memory_map(str(self._folder / name)))
        if not batches.num_record_batches:
            return Run(name, np.empty(0, np.uint64), _none(self._values))
        columns = [column.to_numpy() for column in batches.get_batch(0).columns]
        return Run(name, columns[0], Rows(*columns[1:4], tuple(columns[4:])))

    def _read(self, manifest: Path | None) -> tuple[int, list[Run]]:
        if manifest is None:
            return -1, []
        found = json.loads(manifest.read_text(encoding="utf-8"))
        return found["position"], [self._open(name) for name in found["runs"]]

    def _manifests(self) -> list[Path]:
        return sorted(self._folder.glob("manifest-*.json"))

    def _newest_manifest(self) -> Path | None:
        return next(reversed(self._manifests()), None)

    def _expire(self) -> None:
        """Remove old manifests, and runs that none names any more."""
        manifests = self._manifests()
        if len(manifests) <= _KEPT_MANIFESTS:
            return
        named: set[str] = set()
        for path in manifests[-_KEPT_MANIFESTS:]:
            named.update(json.loads(path.read_text(encoding="utf-8"))["runs"])
        for path in manifests[:-_KEPT_MANIFESTS]:
            path.unlink()
        for path in self._folder.glob("run-*.arrow"):
            if path.name not in named:
                path.unlink()


def _matches(hashes: Hashes, probes: Hashes) -> Ints:
    """The places of sorted hashes that equal one of the sorted probes."""
    low = np.searchsorted(hashes, probes, "left")
    counts = np.searchsorted(hashes, probes, "right") - low
    hit = counts > 0
    low, counts = low[hit], counts[hit]
    starts = np.repeat(low - np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64), counts)
    places: Ints = starts + np.arange(len(starts))
    return places


def _none(values: int) -> Rows:
    empty = np.empty(0, np.int64)
    return Rows(empty, empty, empty, (empty,) * values)

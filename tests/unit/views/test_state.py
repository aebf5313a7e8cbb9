"""State tables: what was put last is found, at a cost that does not depend on what is stored."""

import random

import numpy as np
import pyarrow as pa
import pytest

from cdc.arrays import Ints
from views.state import runs, table
from views.state.key_hash import Hashes, hashes
from views.state.table import StateTable, own_columns

_COLUMNS: dict[str, pa.DataType] = {"id": pa.string(), "value": pa.int64()}
COLUMNS = pa.schema(_COLUMNS)


def put(state: StateTable, *rows: tuple[str, str, int | None]) -> None:
    """Rows as key, id and value; None removes the row."""
    keys, ids = pa.array([row[0] for row in rows]), pa.array([row[1] for row in rows])
    values = pa.array([row[2] or 0 for row in rows], pa.int64())
    live = np.array([row[2] is not None for row in rows])
    state.put(keys, ids, live, pa.table({"value": values, "id": ids, "other": ids}))


def found(state: StateTable, *keys: str) -> dict[str, int]:
    rows = state.lookup(hashes(pa.array(keys, pa.string())))
    return {row["id"]: row["value"] for row in rows.to_pylist()}


def test_the_last_entry_of_a_row_wins_within_a_batch_and_across_batches() -> None:
    state = StateTable(COLUMNS)
    put(state, ("a", "1", 10), ("a", "2", 20), ("a", "1", 11))
    assert found(state, "a") == {"1": 11, "2": 20}
    put(state, ("a", "1", 12), ("a", "2", None), ("b", "2", 21))
    assert found(state, "a", "b") == {"1": 12, "2": 21}
    put(state, ("a", "2", 22))
    assert found(state, "a") == {"1": 12, "2": 22}


def test_an_empty_table_finds_nothing_and_an_empty_batch_changes_nothing() -> None:
    state = StateTable(COLUMNS)
    put(state)
    assert found(state, "a") == {}
    assert list(state.scan()) == []
    assert (state.entries, state.bytes) == (0, 0)


def test_random_batches_leave_what_a_dictionary_holds() -> None:
    rng, state, model = random.Random(5), StateTable(COLUMNS), dict[str, int]()
    for _ in range(60):
        batch = []
        for _ in range(rng.randint(1, 40)):
            key, value = str(rng.randrange(200)), rng.choice([None, rng.randrange(99)])
            batch.append((key, key, value))
            model.pop(key, None)
            if value is not None:
                model[key] = value
        put(state, *batch)
    assert found(state, *map(str, range(200))) == model
    scanned = pa.concat_tables(state.scan())
    assert dict(zip(scanned["id"].to_pylist(), scanned["value"].to_pylist(), strict=True)) == model
    assert own_columns(scanned).schema == COLUMNS


def test_removed_rows_leave_no_entry_once_the_oldest_run_is_merged() -> None:
    state = StateTable(COLUMNS)
    put(state, *((str(number), str(number), number) for number in range(100)))
    put(state, *((str(number), str(number), None) for number in range(100)))
    assert (state.entries, len(state.runs)) == (0, 1)


def test_an_entry_of_a_removed_row_stays_while_an_older_run_has_the_row() -> None:
    state = StateTable(COLUMNS)
    put(state, *((str(number), str(number), number) for number in range(100)))
    put(state, ("7", "7", None))
    assert len(state.runs) == 2
    assert found(state, "7", "8") == {"8": 8}


def test_the_number_of_runs_grows_with_the_logarithm_of_the_rows() -> None:
    state = StateTable(COLUMNS)
    for number in range(400):
        put(state, *((f"{number}-{each}", "1", each) for each in range(5)))
    assert len(state.runs) <= 6
    assert state.entries == 2000


def test_two_keys_with_one_hash_are_both_found_for_the_caller_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(texts: object, seed: int = 0) -> Hashes:
        return np.full(len(texts), 7, np.uint64) if seed == 0 else hashes(texts, 1)  # type: ignore[arg-type]

    monkeypatch.setattr(table, "hashes", same)
    state = StateTable(COLUMNS)
    put(state, ("a", "1", 10), ("b", "2", 20))
    rows = state.lookup(np.array([7], np.uint64))
    assert set(rows.column("id").to_pylist()) == {"1", "2"}


def test_runs_above_the_largest_size_are_not_merged_and_are_scanned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_LARGEST_RUN", 1000)
    monkeypatch.setattr(table, "_SCANNED", 16)
    state = StateTable(COLUMNS)
    for start in range(0, 200, 20):
        put(state, *((str(number), "1", number) for number in range(start, start + 20)))
    put(state, ("3", "1", None), ("5", "1", 50))
    assert len(state.runs) > 5
    pieces = list(state.scan())
    assert max(piece.num_rows for piece in pieces) < 200
    values = [row["value"] for row in pa.concat_tables(pieces).to_pylist()]
    assert sorted(values) == sorted([*(number for number in range(200) if number not in (3, 5)), 50])


def test_a_scan_shows_the_rows_of_its_beginning_also_if_the_table_changes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "_SCANNED", 16)
    state = StateTable(COLUMNS)
    put(state, *((str(number), "1", number) for number in range(100)))
    scan = state.scan()
    first = next(scan)
    put(state, *((str(number), "1", None) for number in range(100)))
    assert first.num_rows + sum(piece.num_rows for piece in scan) == 100


def test_a_lookup_reads_the_rows_that_it_finds_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateTable(COLUMNS)
    put(state, *((str(number), "1", number) for number in range(5000)))
    taken: list[int] = []
    original = runs.spread

    def counted(starts: Ints, counts: Ints) -> Ints:
        taken.append(int(counts.sum()))
        return original(starts, counts)

    monkeypatch.setattr(runs, "spread", counted)
    assert found(state, "17") == {"1": 17}
    assert taken == [1]


def test_hashes_depend_on_the_whole_text_and_are_stable() -> None:
    texts = ["", "a", "b", "ab", "a" * 8, "a" * 9, "a" * 16 + "b", "ü", "\x00", None]
    first = hashes(pa.array(texts))
    assert len(set(first[:9].tolist())) == 9
    assert first[9] == first[0]
    assert (first != hashes(pa.array(texts), 1)).all()
    assert hashes(pa.array(["x", *texts])[1:]).tolist() == first.tolist()
    assert hashes(pa.array(['{"id":1}']))[0] == np.uint64(13434292874440671524)

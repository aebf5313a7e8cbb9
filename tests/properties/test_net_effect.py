"""A transaction under identity FULL leaves what it left in the table, whatever it did to keys on the way.

The model is a table whose rows have an identity that no message shows: two rows may have one key inside a transaction,
as a deferrable key allows, and be equal in every column.
"""

import random
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.capture.transactions import net_effect
from cdc.capture.transactions.net_effect import reduced, reduced_parts
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from tests.properties.test_fold import Registry
from tests.scenes.histories import Row, change, log_table

KEYS = 5


class DeferrableTable:
    """Rows (key, value) by an identity of their own; `changes` is what the stream says under identity FULL."""

    def __init__(self, rng: random.Random, wide: bool) -> None:
        self.rng = rng
        self.wide = wide
        self.rows: dict[int, tuple[int, int]] = {}
        self.changes: list[Row] = []
        self._next = 0
        self._lsn = 100

    def transaction(self) -> None:
        """Random statements, ended by whatever makes the key unique again, as a commit demands."""
        self._lsn += 100
        first = len(self.changes)
        for _ in range(self.rng.randint(1, 6)):
            self._statement()
        held: set[int] = set()
        for row, (key, _) in list(self.rows.items()):
            if key in held:
                self._delete(row)
            held.add(key)
        for ordinal, made in enumerate(self.changes[first:]):
            made.update(version=self._lsn, commit_lsn=self._lsn + 50, ordinal=ordinal)

    def state(self) -> dict[str, str]:
        """Key to image, as a select gives it."""
        return {self._key(key): self._image(key, value) for key, value in self.rows.values()}

    def _statement(self) -> None:
        chance = self.rng.random()
        if chance < 0.05:
            self.rows.clear()
            self.changes.append(change("t", None, 0))
        elif chance < 0.3 and self.rows:
            self._delete(self.rng.choice(list(self.rows)))
        elif chance < 0.5:
            for row in list(self.rows):  # update t set id = id + 1
                self._move(row, (self.rows[row][0] + 1) % KEYS)
        elif chance < 0.75 and self.rows:
            self._move(self.rng.choice(list(self.rows)), self.rng.randrange(KEYS))
        else:
            self._next += 1
            self.rows[self._next] = (self.rng.randrange(KEYS), self._value())
            self._say("c", None, self.rows[self._next])

    def _move(self, row: int, key: int) -> None:
        old, new = self.rows[row], (key, self._value())
        self.rows[row] = new
        if old[0] == key:
            self._say("u", old, new)
        else:
            self._say("d", old, None)
            self._say("c", None, new)

    def _delete(self, row: int) -> None:
        self._say("d", self.rows.pop(row), None)

    def _value(self) -> int:
        return self.rng.randrange(2) if self.wide else 0

    def _say(self, op: str, before: tuple[int, int] | None, after: tuple[int, int] | None) -> None:
        shown = after or before
        assert shown is not None
        made = change(op, self._key(shown[0]), 0, None if after is None else self._image(*after))
        made["before"] = None if before is None else self._image(*before)
        self.changes.append(made)

    def _key(self, key: int) -> str:
        return f'{{"id":{key}}}'

    def _image(self, key: int, value: int) -> str:
        return f'{{"id":{key},"v":{value}}}' if self.wide else self._key(key)


def _applied(stored: dict[str, str], rows: pa.Table) -> dict[str, str]:
    """What a store holds after a batch."""
    batches = gather(ranked(rows), Registry()).batches
    if any(batch.truncated for batch in batches):
        stored = {}
    for row in (row for batch in batches for row in batch.rows.to_pylist()):
        stored = {key: image for key, image in stored.items() if key != row["key"]}
        if row["op"] == "u":
            stored[row["key"]] = row["after"]
    return stored


@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 8))
def test_stores_hold_what_the_table_holds_after_every_transaction(seed: int, wide: bool, count: int) -> None:
    table = DeferrableTable(random.Random(seed), wide)
    stored: dict[str, str] = {}
    for _ in range(count):
        first = len(table.changes)
        table.transaction()
        stored = _applied(stored, reduced(log_table(table.changes[first:])))
        assert stored == table.state()


@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 8))
def test_several_transactions_at_once_are_reduced_one_by_one(seed: int, wide: bool, count: int) -> None:
    table = DeferrableTable(random.Random(seed), wide)
    for _ in range(count):
        table.transaction()
    assert _applied({}, reduced(log_table(table.changes))) == table.state()


@given(st.integers(0, 2**32), st.booleans(), st.lists(st.integers(1, 20), max_size=5))
def test_a_transaction_in_parts_is_reduced_like_one_in_memory(seed: int, wide: bool, cuts: list[int]) -> None:
    table = DeferrableTable(random.Random(seed), wide)
    table.transaction()
    rows = log_table(table.changes)

    def parts() -> Iterator[pa.Table]:
        at = 0
        for cut in [*cuts, rows.num_rows]:
            yield rows.slice(at, cut)
            at += cut

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(net_effect, "PASS_BYTES", 64)
        found = pa.concat_tables([rows.slice(0, 0), *reduced_parts(parts)])
    assert found.to_pylist() == reduced(rows).to_pylist()


def test_a_shifted_key_keeps_every_row() -> None:
    """update t set id = id + 1 over 1, 2, 3: rows 2, 3 and 4 are left."""
    rows = [change("c", f'{{"id":{key}}}', 9, f'{{"id":{key},"v":"{key}"}}', ordinal=key) for key in (1, 2, 3)]
    for key in (1, 2, 3):
        gone = {**change("d", f'{{"id":{key}}}', 99), "before": f'{{"id":{key},"v":"{key}"}}'}
        come = change("c", f'{{"id":{key + 1}}}', 99, f'{{"id":{key + 1},"v":"{key}"}}')
        rows += [{**gone, "ordinal": 2 * key}, {**come, "ordinal": 2 * key + 1}]
    images = [f'{{"id":{key + 1},"v":"{key}"}}' for key in (1, 2, 3)]
    assert sorted(_applied({}, reduced(log_table(rows))).values()) == images


def _of_key(*changes: tuple[str, int, str | None, str | None]) -> list[Row]:
    """Changes of one key in one transaction: op, schema, row after, row before."""
    rows = [(change(op, '{"id":1}', 99, after, schema_id=schema), before) for op, schema, after, before in changes]
    return [{**row, "before": before, "ordinal": at} for at, (row, before) in enumerate(rows)]


def test_a_row_inserted_and_deleted_around_a_change_of_columns_is_gone() -> None:
    """begin; insert; alter table add column; delete; commit: the delete shows a column that the insert lacks."""
    rows = _of_key(("c", 1, '{"id":1}', None), ("d", 2, None, '{"id":1,"more":7}'))
    assert _applied({}, reduced(log_table(rows))) == {}


def test_a_second_delete_of_a_key_ends_the_row_that_was_inserted_between_them() -> None:
    """Whatever it shows: before the transaction the key had one row, which the first delete ended."""
    rows = _of_key(("d", 1, None, '{"id":1}'), ("c", 1, '{"id":1,"v":1}', None), ("d", 1, None, '{"id":1,"v":1.0}'))
    assert _applied({'{"id":1}': '{"id":1}'}, reduced(log_table(rows))) == {}

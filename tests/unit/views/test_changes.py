"""Changes of a captured table as a delta of its rows."""

from collections.abc import Sequence

import pyarrow as pa
import pytest

from cdc.key_range import KeyRange, Level
from cdc.model import LOG_SCHEMA
from tests.scenes.view_histories import NOW, table_id
from views.dataflow.changes import InputTable
from views.dataflow.delta import net, signed

Change = tuple[str, int | str | None, str | None, Sequence[str]]


def log(*transactions: Sequence[Change]) -> pa.Table:
    """Transactions of changes: op, id, the rest of the image, columns that were not sent."""
    rows = []
    for lsn, changes in enumerate(transactions, 1):
        for ordinal, (op, number, rest, unsent) in enumerate(changes):
            key = number if isinstance(number, str) or number is None else f'{{"id":{number}}}'
            after = None if rest is None else f'{{"id":{number}{rest}}}'
            row: dict[str, object] = {"table": "public.t", "op": op, "key": key, "after": after, "ordinal": ordinal}
            row |= {"version": lsn, "commit_lsn": lsn, "xid": 1, "commit_ts": NOW, "schema_id": 1}
            rows.append({**row, "unchanged": list(unsent) or None})
    return pa.Table.from_pylist(rows, LOG_SCHEMA)


def rows_of(delta: pa.Table) -> list[tuple[int, str | None, str | None]]:
    found = delta.select(["_sign", "a", "b"]).to_pylist()
    return [(row["_sign"], row["a"], row["b"]) for row in found]


@pytest.fixture
def rows() -> InputTable:
    return InputTable(table_id("t"), ("a", "b"))


def test_an_insert_an_update_and_a_delete_are_new_rows_and_old_rows(rows: InputTable) -> None:
    assert rows_of(rows.step(log([("c", 1, ',"a":"x","b":1', ())]))) == [(1, '"x"', "1")]
    assert rows_of(rows.step(log([("u", 1, ',"a":"y","b":1', ())]))) == [(-1, '"x"', "1"), (1, '"y"', "1")]
    assert rows_of(rows.step(log([("d", 1, None, ())]))) == [(-1, '"y"', "1")]
    assert rows_of(rows.step(log([("d", 1, None, ())]))) == []


def test_what_a_batch_undoes_is_no_change(rows: InputTable) -> None:
    image = ',"a":"x","b":null'
    assert rows_of(rows.step(log([("c", 1, image, ())], [("d", 1, None, ())]))) == []
    rows.step(log([("c", 1, image, ())]))
    assert rows_of(rows.step(log([("d", 1, None, ()), ("c", 1, image, ())], [("u", 1, image, ())]))) == []


def test_a_column_that_was_not_sent_has_the_value_of_before(rows: InputTable) -> None:
    rows.step(log([("c", 1, ',"a":"x","b":1', ())]))
    assert rows_of(rows.step(log([("u", 1, ',"a":"y"', ["b"])]))) == [(-1, '"x"', "1"), (1, '"y"', "1")]
    later = rows.step(log([("u", 1, ',"b":2', ["a"])], [("u", 1, "", ["a", "b"])]))
    assert rows_of(later) == [(-1, '"y"', "1"), (1, '"y"', "2")]


def test_a_column_that_was_not_sent_may_be_null_and_stays_null(rows: InputTable) -> None:
    rows.step(log([("c", 1, ',"a":null,"b":1', ())]))
    assert rows_of(rows.step(log([("u", 1, ',"b":2', ["a"])]))) == [(-1, None, "1"), (1, None, "2")]


def test_a_changed_key_takes_along_what_was_not_sent_also_twice_in_one_transaction(rows: InputTable) -> None:
    rows.step(log([("c", 1, ',"a":"x","b":1', ())]))
    moved = log([("d", 1, None, ()), ("c", 2, ',"a":"y"', ["b"]), ("d", 2, None, ()), ("c", 3, "", ["a", "b"])])
    assert rows_of(rows.step(moved)) == [(-1, '"x"', "1"), (1, '"y"', "1")]
    again = log([("u", 3, ',"a":"z"', ["b"])], [("d", 3, None, ()), ("c", 1, ',"b":5', ["a"])])
    assert rows_of(rows.step(again)) == [(-1, '"y"', "1"), (1, '"z"', "5")]


def test_an_update_after_the_delete_of_another_row_takes_nothing_from_that_row(rows: InputTable) -> None:
    rows.step(log([("c", 1, ',"a":"x","b":1', ()), ("c", 5, ',"a":"other","b":5', ())]))
    moved = [("d", 1, None, ()), ("c", 3, ',"a":"y"', ["b"])]
    delta = rows.step(log(moved, [("d", 5, None, ()), ("u", 3, ',"a":"z"', ["b"])]))
    assert (1, '"z"', "1") in rows_of(delta)


def test_rows_exchange_their_keys(rows: InputTable) -> None:
    rows.step(log([("c", 1, ',"a":"x","b":1', ()), ("c", 2, ',"a":"y","b":2', ())]))
    swap = [("d", 1, None, ()), ("c", 9, ',"a":"x"', ["b"]), ("d", 2, None, ()), ("c", 1, ',"a":"y"', ["b"])]
    delta = rows.step(log([*swap, ("d", 9, None, ()), ("c", 2, ',"a":"x"', ["b"])]))
    assert sorted(rows_of(delta)) == [(-1, '"x"', "1"), (-1, '"y"', "2"), (1, '"x"', "1"), (1, '"y"', "2")]
    assert delta.column("_id").to_pylist().count('{"id":1}') == 2


def test_a_row_that_a_backfill_has_still_to_read_is_not_there_until_it_is_complete(rows: InputTable) -> None:
    assert rows_of(rows.step(log([("u", 1, ',"a":"y"', ["b"])]))) == []
    assert rows_of(rows.step(log([("u", 1, ',"a":"z"', ["b"])], [("d", 1, None, ()), ("c", 2, "", ["a", "b"])]))) == []
    assert rows_of(rows.step(log([("u", 2, ',"a":"z","b":7', ())]))) == [(1, '"z"', "7")]
    assert rows_of(rows.step(log([("u", 5, ',"a":"z"', ["b"])], [("r", 5, ',"a":"z","b":1', ())]))) == [(1, '"z"', "1")]


def test_a_truncate_takes_every_row_before_it_and_none_after_it(rows: InputTable) -> None:
    rows.step(log([("c", 1, ',"a":"x","b":1', ())]))
    mixed = log([("c", 2, ',"a":"y","b":2', ()), ("t", None, None, ()), ("c", 1, ',"a":"x","b":3', ())])
    assert rows_of(rows.step(mixed)) == [(-1, '"x"', "1"), (1, '"x"', "3")]
    assert rows_of(rows.step(log([("t", None, None, ())]))) == [(-1, '"x"', "3")]
    assert rows.state.entries == 0
    assert rows_of(rows.step(log([("t", None, None, ())]))) == []


def test_a_removed_range_takes_its_rows(rows: InputTable) -> None:
    rows.step(log([("c", number, ',"a":"x","b":1', ()) for number in range(5)]))
    text = KeyRange((Level(("id",), ("number",), ("1",), ("3",)),)).text()
    assert len(rows_of(rows.step(log([("p", text, None, ())])))) == 2
    assert rows.state.entries >= 3
    assert len(rows_of(rows.step(log([("t", None, None, ())])))) == 3


def test_messages_are_no_rows(rows: InputTable) -> None:
    assert rows_of(rows.step(log([("m", None, None, ())]))) == []


def test_odd_texts_are_kept_byte_by_byte(rows: InputTable) -> None:
    cells = ['"\\u0001"', '"ü\\"\\\\,}"', "123456789012345678901234567890.00000000000001", "-0", '{"x":[1,2]}', '""']
    for number, cell in enumerate(cells):
        (found,) = rows_of(rows.step(log([("c", number, f',"a":{cell},"b":0', ())])))
        assert found[1] == cell


def _delta(*rows: tuple[str, int, float | None]) -> pa.Table:
    table = pa.table({"_id": [row[0] for row in rows], "x": pa.array([row[2] for row in rows], pa.float64())})
    return net(signed(table, pa.array([row[1] for row in rows], pa.int8()).to_numpy()))


def test_the_net_of_a_delta_has_at_most_one_old_and_one_new_row_of_each_id() -> None:
    found = _delta(("a", -1, 1.0), ("b", 1, 5.0), ("a", 1, 2.0), ("a", -1, 2.0), ("a", 1, 3.0), ("b", -1, 5.0))
    assert found.to_pylist() == [{"_id": "a", "_sign": -1, "x": 1.0}, {"_id": "a", "_sign": 1, "x": 3.0}]


def test_a_row_that_is_what_it_was_is_no_change_but_zero_and_minus_zero_differ() -> None:
    for same in (1.0, None, float("nan"), -0.0):
        assert _delta(("a", -1, same), ("a", 1, same)).num_rows == 0
    assert _delta(("a", -1, 0.0), ("a", 1, -0.0)).num_rows == 2
    assert _delta(("a", -1, None), ("a", 1, 0.0)).num_rows == 2

"""A share in pieces: whole keys, every row once, and a cost that depends on the rows and not on how they arrive."""

import pyarrow as pa

from sinks.tasks.share_pieces import pieces
from tests.scenes.histories import change, log_table

_ROWS = log_table(
    [change("u", f'{{"id":{number % 700}}}', number, f'{{"id":{number % 700}}}') for number in range(4_000)]
)
_SIZE = _ROWS.nbytes // 4


def _small_tables() -> list[pa.Table]:
    return [_ROWS.slice(at, 10) for at in range(0, _ROWS.num_rows, 10)]


def test_each_piece_has_whole_keys_in_the_order_of_the_log_and_every_row_is_in_one() -> None:
    piece_of: dict[str, int] = {}
    versions: dict[str, list[int]] = {}
    for number, piece in enumerate(pieces(_small_tables(), _SIZE)):
        for row in piece.to_pylist():
            assert piece_of.setdefault(row["key"], number) == number
            versions.setdefault(row["key"], []).append(row["version"])
    assert versions == {f'{{"id":{number}}}': list(range(number, 4_000, 700)) for number in range(700)}


def test_many_small_tables_are_not_divided_one_by_one() -> None:
    """Four hundred tables of ten rows: each divided into 64 files would be thousands of writes of one row."""
    found = list(pieces(_small_tables(), _SIZE))
    assert len(found) > 1
    assert sum(piece["key"].num_chunks for piece in found) <= 64 * (4 + 1)


def test_a_small_share_is_one_piece_and_an_empty_one_none() -> None:
    (whole,) = pieces(_small_tables(), _ROWS.nbytes * 2)
    assert whole.equals(_ROWS)
    assert not list(pieces([], 1))

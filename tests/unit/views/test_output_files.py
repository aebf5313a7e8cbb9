"""The files in which a view hands its output to capture."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.errors import LogCorrupt
from cdc.model import LOG_SCHEMA
from tests.scenes.view_rows import TOTALS, output
from views.output_files import OutputFile, OutputFolder


def test_a_file_is_read_as_it_was_put(tmp_path: Path) -> None:
    folder, put = OutputFolder(tmp_path, "totals"), output("", "A", 100, 1, 2)
    found = folder.read(folder.put(put))
    assert (found.view, found.before, found.after, found.schema) == ("totals", "", "A", TOTALS)
    assert found.rows.equals(put.rows)


def test_files_are_pending_in_the_order_in_which_they_were_put_by_whichever_process(tmp_path: Path) -> None:
    first = [OutputFolder(tmp_path, "totals").put(output("", "A", 100, 1)) for _ in range(3)]
    second = OutputFolder(tmp_path, "totals")
    second.put(output("A", "B", 200, 2))
    assert list(second.pending())[:3] == first
    assert len(second.pending()) == 4
    assert second.size == sum(path.stat().st_size for path in second.pending())


def test_nothing_is_pending_after_a_clear_and_numbers_go_on(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path, "totals")
    old = folder.put(output("", "A", 100, 1))
    folder.clear()
    assert not folder.pending()
    assert folder.size == 0
    assert folder.put(output("", "A", 100, 1)).name > old.name


def test_a_file_without_rows_moves_the_mark_only(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path, "totals")
    found = folder.read(folder.put(output("A", "B", 100)))
    assert (found.rows.num_rows, found.after) == (0, "B")


def test_half_a_file_is_an_error_that_names_the_view(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path, "totals")
    path = folder.put(output("", "A", 100, 1))
    for cut in (0, 10, path.stat().st_size // 2):
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(LogCorrupt, match="view totals"):
            folder.read(path)


def _bad(name: str) -> OutputFile:
    good = output("", "A", 100, 1)
    at = LOG_SCHEMA.get_field_index("table")
    other = good.rows.set_column(at, LOG_SCHEMA.field("table"), pa.array(["public.orders"]))
    nulls = good.rows.set_column(at, LOG_SCHEMA.field("table"), pa.array([None], pa.string()))
    return {
        "does not move": replace(good, after=""),
        "LOG_SCHEMA": replace(good, rows=good.rows.drop_columns(["xid"])),
        "nulls in table": replace(good, rows=nulls),
        "not all of table view.totals": replace(good, rows=other),
    }[name]


@pytest.mark.parametrize("why", ["does not move", "LOG_SCHEMA", "nulls in table", "not all of table view.totals"])
def test_what_the_log_could_not_take_is_refused_to_the_view_itself(why: str, tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path, "totals")
    with pytest.raises(ValueError, match=why):
        folder.put(_bad(why))
    assert not folder.pending()


def test_a_newer_request_to_emit_again_survives_the_answer_to_an_older_one(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path, "totals")
    assert folder.asked_to_emit_again() == ""
    folder.ask_to_emit_again()
    first = folder.asked_to_emit_again()
    folder.ask_to_emit_again()
    folder.emitted_again(first)
    second = folder.asked_to_emit_again()
    assert second not in ("", first)
    folder.emitted_again(second)
    assert folder.asked_to_emit_again() == ""

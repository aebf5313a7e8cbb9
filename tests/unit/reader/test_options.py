"""The options of the format `millrace`: what is given wrongly is named, never ignored."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql.types import StructType

from cdc.errors import ConfigError
from cdc.model import TableId
from pyspark_millrace.options import (
    Edge,
    Mode,
    Preimages,
    ReadOptions,
    Truncates,
    parse,
    require_batch,
    require_streamed,
)
from pyspark_millrace.source import MillraceSource

LEAST = {"pipeline": "millrace.yaml", "table": "public.orders"}


def test_pipeline_and_table_suffice() -> None:
    assert parse(LEAST) == ReadOptions(Path("millrace.yaml"), TableId("public", "orders"))


def test_every_option_is_read_in_any_case_of_its_name() -> None:
    given = {
        "COLUMNS": "id, note",
        "maxchangespertrigger": "7",
        "maxPartitions": "3",
        "consumer": "report",
        "preimages": "REQUIRED",
        "truncates": "emit",
        "mode": "permissive",
    }
    found = parse({**LEAST, **given})
    assert (found.columns, found.limit, found.partitions, found.consumer) == (("id", "note"), 7, 3, "report")
    assert (found.rules.preimages, found.rules.truncates) == (Preimages.REQUIRED, Truncates.EMIT)
    assert found.rules.mode is Mode.PERMISSIVE


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("start", Edge.START),
        ("NOW", Edge.NOW),
        ("16/B374D848", 0x16B374D848),
        ("2026-03-01T12:00:00Z", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("2026-03-01T13:00:00+01:00", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("2026-03-01 12:00", datetime(2026, 3, 1, 12, tzinfo=UTC)),
    ],
)
def test_a_point_is_an_end_of_the_log_an_lsn_or_a_time(text: str, point: object) -> None:
    assert parse({**LEAST, "from": text}).begin == point


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"pipeline": "x"}, "'table' of the format millrace is missing"),
        ({"table": "public.orders"}, "'pipeline' of the format millrace is missing"),
        ({**LEAST, "table": "orders"}, "'orders' is not a table; write schema.name"),
        ({**LEAST, "colums": "id"}, "'colums' of the format millrace is not known; did you mean 'columns'"),
        ({**LEAST, "path": "x"}, "'path' of the format millrace is not known"),
        ({**LEAST, "from": "yesterday"}, "'from' of the format millrace is 'yesterday'. Give now, start, an LSN"),
        ({**LEAST, "until": "start"}, "'until' of the format millrace is 'start'"),
        ({**LEAST, "from": "1/2/3"}, "'from' of the format millrace"),
        (
            {**LEAST, "maxChangesPerTrigger": "many"},
            "'maxChangesPerTrigger' of the format millrace is not a whole number",
        ),
        ({**LEAST, "mode": "DROPMALFORMED"}, "'mode' of the format millrace must be one of failfast, permissive"),
        ({**LEAST, "consumer": "a/b"}, "'a/b' is not a valid consumer name"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(given)
    assert named in str(caught.value)


def test_columns_of_the_users_own_are_refused() -> None:
    source = MillraceSource(dict(LEAST))
    for read in (source.reader, source.streamReader):
        with pytest.raises(ConfigError, match=r"columns of public.orders come from the log.* option 'columns'"):
            read(StructType())


def test_what_only_a_stream_or_only_a_batch_knows_is_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"'until' .* use spark.read, or the trigger availableNow"):
        require_streamed({**LEAST, "UNTIL": "now"})
    for name in ("maxChangesPerTrigger", "consumer"):
        with pytest.raises(ConfigError, match=f"'{name}' .* use spark.readStream"):
            require_batch({**LEAST, name: "1"})
    require_streamed(LEAST)
    require_batch(LEAST)

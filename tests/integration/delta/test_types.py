"""Every type of the corpus, from a real Postgres into Delta: the same value, or a refusal that names the column."""

import base64
import json
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from cdc.capture.rows.mask import Masking
from cdc.config.settings import TableSettings
from cdc.errors import Rejected
from cdc.model import TableId
from cdc.ports import Batch
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.settings import DeltaSettings
from sinks.fold.spark import FOLDED
from snapshots.tables.rows import describe, read_images
from snapshots.verify.comparison import whole_table
from tests.corpus import types
from tests.corpus.changes import PINNED
from tests.fix_servers import Database
from tests.scenes.histories import WHEN

TABLE = TableId("public", "corpus")
CASES = list(types.cases())
VALUES = [(case, sql, text) for case in CASES for sql, text in case.values]
"""One row each: a value that is refused takes no other with it."""

Read = Callable[[str], Any]
READERS: dict[str, Read] = {
    "smallint": int,
    "int": int,
    "bigint": int,
    "oid": int,
    "positive": int,
    "small_positive": int,
    "xid": lambda text: int(json.loads(text)),
    "real": lambda text: float(np.float32(json.loads(text))),
    "double precision": lambda text: float(json.loads(text)),
    "boolean": lambda text: text == "true",
    "numeric(12,2)": Decimal,
    "numeric(5)": Decimal,
    "bytea": lambda text: base64.b64decode(json.loads(text)),
    "date": lambda text: date.fromisoformat(json.loads(text)),
    "timestamp": lambda text: datetime.fromisoformat(json.loads(text)),
    "timestamptz": lambda text: datetime.fromisoformat(json.loads(text)),
}


def wanted(type_: str, text: str) -> Any:
    """The value that Delta must hold for this JSON value; ValueError if there is none."""
    if text == "null":
        return None
    if type_.endswith("[]") or type_ in ("json", "jsonb", "numbers"):
        return text
    for name in (type_, type_.split("(", maxsplit=1)[0]):
        if name in READERS:
            return READERS[name](text)
    return json.loads(text) if text.startswith('"') else text


def comparable(value: Any) -> str:
    """NaN equals NaN, and -0 is not 0."""
    return repr(value)


def test_every_value_of_every_type_arrives_exactly_or_is_refused_by_name(database: Database, tmp_path: Path) -> None:
    columns = ", ".join(f"{case.column} {case.type}" for case in CASES)
    with database.connect(options=PINNED) as connection:
        for statement in types.SETUP:
            connection.execute(statement.encode())
        connection.execute(f"create table corpus (id int primary key, {columns})".encode())
        for number, (case, sql, _) in enumerate(VALUES):
            insert = f"insert into corpus (id, {case.column}) values ({number}, ({sql})::{case.type})"
            connection.execute(insert.encode())
        readable = describe(connection, TableSettings(name=TABLE), Masking())
        images = pa.concat_tables(read_images(connection, readable, whole_table(readable)))
    schema = readable.layout.schema
    sink = delta.open_sink(DeltaSettings(path=str(tmp_path)), SinkContext(tmp_path))
    sink.prepare(schema)
    refused: dict[int, str] = {}
    try:
        sink.apply(Batch(schema, folded(images)))
    except Rejected as rejected:
        refused = {json.loads(item.key)["id"]: item.reason for item in rejected.items}
    stored = {row["id"]: row for row in DeltaTable(tmp_path / "public.corpus").to_pyarrow_table().to_pylist()}
    wrong = []
    for number, (case, _, text) in enumerate(VALUES):
        try:
            value = wanted(case.type, text)
        except ValueError:
            assert refused.pop(number).startswith(f"column {case.column}: value does not fit ")
            assert number not in stored
            continue
        found = stored[number][case.column]
        if comparable(found) != comparable(value) and found != value:
            wrong.append((case.type, text[:40], repr(found)[:60]))
    assert not wrong
    assert not refused


def folded(images: pa.Table) -> pa.Table:
    count = images.num_rows
    columns: dict[str, Any] = {
        "table": [str(TABLE)] * count,
        "key": images["key"].to_pylist(),
        "op": ["u"] * count,
        "after": images["after"].to_pylist(),
        "unchanged": [None] * count,
        "version": [5] * count,
        "commit_lsn": [6] * count,
        "commit_ts": [WHEN] * count,
        "schema_id": [1] * count,
    }
    return pa.table(columns, schema=FOLDED)

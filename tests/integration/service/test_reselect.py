"""A partial change whose stored row has gone: read again from the source, never written half."""

import threading
from pathlib import Path

import psycopg.conninfo

from cdc.config.secret import Secret
from cdc.config.settings import SourceSettings
from cdc.model import Lsn
from cdc.ports import Batch
from cdc.service.apply.reselect import SourceRows
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.fold.folded import Folded
from sinks.memory import MemorySink, Store
from snapshots.tables.rows import describe, masking_of
from tests.fix_log import FilledLog
from tests.fix_servers import Database
from tests.scenes.histories import batch, change


def source_of(database: Database, **table: object) -> SourceSettings:
    parts = psycopg.conninfo.conninfo_to_dict(database.dsn)
    return SourceSettings(
        host=str(parts["host"]),
        port=int(str(parts["port"])),
        database=database.name,
        user=str(parts["user"]),
        password=Secret(database.server.password),
        mask_key=Secret("for the test"),
        tables=[{"name": "public.items", **table}],
    )


def prepared(log: FilledLog, source: SourceSettings, state: Path) -> tuple[Applier, MemorySink]:
    from cdc.capture.source.connect import connect

    with connect(source) as connection:
        log.record(describe(connection, source.tables[0], masking_of(source)).layout.schema)
    sink = MemorySink("store", Store())
    letters = DeadLetters(state / "letters")
    applier = Applier(
        "store", open_sink=lambda: sink, log=log.reader, letters=letters, stop=threading.Event(),
        reselect=SourceRows(source),
    )  # fmt: skip
    return applier, sink


def partial(log: FilledLog, key: str, version: int) -> Folded:
    schema = log.writer.schemas.newest()[0]
    whole: Batch = batch(schema, [change("u", key, version, key[:-1] + ',"label":"new"}', ["big"])])
    return Folded(Lsn(version), None, [whole])


CREATE = "create table items (id int, at timestamptz, label text, big text, primary key (id, at))"
KEY = '{"id":1,"at":"2024-01-31T10:00:00.5Z"}'


def test_the_row_is_read_again_and_applied_with_the_version_of_its_change(
    database: Database, filled_log: FilledLog, state_dir: Path
) -> None:
    database.execute(CREATE, "insert into items values (1, '2024-01-31 10:00:00.5+00', 'new', repeat('x', 10))")
    applier, sink = prepared(filled_log, source_of(database), state_dir)
    applier.apply(partial(filled_log, KEY, 50))
    schema = filled_log.writer.schemas.newest()[0]
    assert sink.stored(schema).to_pylist() == [{"key": KEY, "after": KEY[:-1] + ',"label":"new","big":"xxxxxxxxxx"}'}]
    sink.apply(batch(schema, [change("u", KEY, 51, KEY[:-1] + ',"label":"later","big":"y"}')]))
    assert '"later"' in sink.stored(schema).to_pylist()[0]["after"]
    assert applier.status.dead_letters == 0


def test_a_row_that_is_gone_from_the_source_is_left_to_its_delete(
    database: Database, filled_log: FilledLog, state_dir: Path
) -> None:
    database.execute(CREATE)
    applier, sink = prepared(filled_log, source_of(database), state_dir)
    applier.apply(partial(filled_log, KEY, 50))
    assert sink.stored(filled_log.writer.schemas.newest()[0]).num_rows == 0
    assert applier.status.dead_letters == 0


def test_a_key_that_cannot_be_looked_up_becomes_a_dead_letter(
    database: Database, filled_log: FilledLog, state_dir: Path
) -> None:
    database.execute(CREATE)
    source = source_of(database, mask={"id": "hash"})
    applier, _ = prepared(filled_log, source, state_dir)
    applier.apply(partial(filled_log, KEY, 50))
    assert applier.status.dead_letters == 1

"""The catalog that the views of a pipeline are checked against: schemas from the log, foreign keys from the source."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from cdc.capture.source import foreign_keys
from cdc.capture.source.connect import brief, connect
from cdc.config.settings import Settings, ViewSettings
from cdc.durable_files import make_folder, replace_unsynced
from cdc.errors import SourceRefused
from cdc.model import ForeignKey, TableId, TableSchema
from cdc.ports import LogReader
from snapshots.backfill.jobs import JobState, known, own_id
from snapshots.initial.snapshot import EXACT_MARK
from snapshots.tables.rows import describe, masking_of
from views.catalog import Catalog
from views.output_files import view_folder

_FILE = "foreign-keys.json"


def current_catalog(settings: Settings, log: LogReader) -> Catalog:
    """The catalog now. Raises SourceLost if the source cannot be asked."""
    with brief(settings.source) as connection:
        return _catalog(settings, log, foreign_keys.read(connection, settings.captured))


def whole_catalog(settings: Settings, log: LogReader) -> Catalog:
    """The catalog now; a table that the log does not have yet is described by the source. Raises SourceLost."""
    found = current_catalog(settings, log)
    missing = [table for table in settings.source.tables if table.name not in found.schemas]
    described: list[TableSchema] = []
    if missing:
        with connect(settings.source) as connection:
            for table in missing:
                with suppress(SourceRefused):  # it does not exist: the view that needs it says so
                    described.append(describe(connection, table, masking_of(settings.source)).layout.schema)
    return replace(found, schemas={**found.schemas, **{schema.table: schema for schema in described}})


def catalog_of(settings: Settings, view: ViewSettings, log: LogReader) -> Catalog:
    """The catalog that a view was first planned with, so that a key that is dropped at the source, or a source that is
    down, does not stop it. Another definition is planned with the present one."""
    path = view_folder(settings.state, view.name) / _FILE
    digest = hashlib.sha256(view.model_dump_json().encode()).hexdigest()
    if (stored := _stored(path, digest)) is not None:
        return _catalog(settings, log, stored)
    found = current_catalog(settings, log)
    make_folder(path.parent)
    body = {"settings": digest, "keys": [asdict(key) for key in found.foreign_keys]}
    replace_unsynced(path, json.dumps(body).encode())
    return found


def _catalog(settings: Settings, log: LogReader, keys: tuple[ForeignKey, ...]) -> Catalog:
    captured = frozenset(settings.captured)
    schemas = {schema.table: schema for schema in log.schemas.newest() if schema.table in captured}
    return Catalog(schemas, keys, captured)


def _stored(path: Path, digest: str) -> tuple[ForeignKey, ...] | None:
    """The foreign keys with which these settings were planned first; None if they were not."""
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return tuple(map(_foreign_key, body["keys"])) if body.get("settings") == digest else None


def _foreign_key(facts: Mapping[str, Mapping[str, str]]) -> ForeignKey:
    table, parent = TableId(**facts["table"]), TableId(**facts["parent"])
    return ForeignKey(table, tuple(facts["columns"]), parent, tuple(facts["parent_columns"]))


def all_rows_read(marks: Mapping[str, str], tables: Mapping[TableId, object]) -> bool:
    """Whether every row of these tables is in the log: their snapshots are complete."""
    if not marks.get(EXACT_MARK):
        return False
    jobs = known(marks)
    own = [jobs[own_id(table)] for table in tables if own_id(table) in jobs]
    return all(job.state in (JobState.DONE, JobState.LEFT) for job in own)

"""Which version of a key each store has now. Asks all stores at once; returns versions and places, no row values."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from cdc.config.settings import Settings, SinkSettings
from cdc.errors import MillraceError
from cdc.model import Lsn, TableId, TableSchema, format_lsn
from cdc.ports import LogReader
from sinks import registry
from sinks.context import SinkContext
from sinks.rows.stored_key import KeyReader

_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """`state` is `there`, `deleted`, `absent` or `unknown`; `trouble` says why it is unknown. `place` is where in the
    store the row is: an index, a key, a path."""

    state: str
    version: str = ""
    place: str = ""
    trouble: str = ""


def stored_versions(
    settings: Settings, sinks: Sequence[SinkSettings], reader: LogReader, table: TableId, key: str
) -> Mapping[str, StoredVersion]:
    """By sink. A store that does not answer in time is `unknown`, and does not delay the others."""
    schema = next((one for one in reader.schemas.newest() if one.table == table), None)
    if schema is None or not sinks:
        return {
            sink.name: StoredVersion("unknown", trouble="The log has no schema of this table yet.") for sink in sinks
        }
    found = {
        sink.name: StoredVersion("unknown", trouble=f"It did not answer within {_ANSWER_SECONDS:g} s.")
        for sink in sinks
    }

    def read(sink: SinkSettings) -> None:
        found[sink.name] = _read(settings, sink, schema, key)

    threads = [threading.Thread(target=read, args=(sink,), name=f"read-{sink.name}", daemon=True) for sink in sinks]
    deadline = time.monotonic() + _ANSWER_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _read(settings: Settings, sink: SinkSettings, schema: TableSchema, key: str) -> StoredVersion:
    try:
        with closing(registry.open_sink(sink, SinkContext(settings.state))) as opened:
            if not isinstance(opened, KeyReader):
                return StoredVersion("unknown", trouble=f"A sink of kind {sink.kind} cannot look up a key.")
            found = opened.stored_key(schema, key)
    except MillraceError as error:
        return StoredVersion("unknown", trouble=str(error))
    version = format_lsn(Lsn(found.version)) if found.version else ""
    return StoredVersion(found.state, version, found.place)

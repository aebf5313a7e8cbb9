"""The Redis sink: one key for a row and one for its version, both written by a script, a few hundred rows per call.

A row is the JSON text of the log, or a hash with one text field per column (nulls left out). A deleted row leaves its
version as a tombstone, which expires: keep it for longer than a replay reaches back. A Redis that evicts keys may lose
rows and versions; rows come back with their next change or a replay, and `facts` shows the eviction policy.

In mode `invalidate` a change only deletes the row's key and writes its version: the application fills the cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, starmap
from typing import Any

import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from cdc.errors import Busy, Rejected, RejectedItem, SinkError
from cdc.key_range import Removal
from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Batch, Sink
from sinks.context import SinkContext
from sinks.fingerprints import Difference, Mark
from sinks.redis.errors import translated_errors
from sinks.redis.fingerprint import StoreMark
from sinks.redis.keys import Names, escaped
from sinks.redis.row_formats import ROW_FORMATS, StoredValue
from sinks.redis.script import Script, Write
from sinks.redis.settings import RedisSettings
from sinks.redis.stored_rows import RedisRows
from sinks.rows.images import STORED_ROW_MISSING, columns, not_before, partial_first
from sinks.rows.read_sizes import by_bytes
from sinks.rows.stored_images import in_key_order
from sinks.rows.stored_key import StoredKey

_LARGEST_VALUE = 512 << 20  # proto-max-bulk-len
_ROUNDS = 5
_SCAN = 1000


def open_sink(settings: RedisSettings, context: SinkContext) -> Sink:
    """Connect and send one command, so that wrong credentials fail at the start."""
    return RedisSink(settings, _client(settings))


def _client(settings: RedisSettings) -> "redis.Redis":
    options: dict[str, Any] = {
        "username": settings.username or None,
        "password": settings.password.reveal() or None,
        "socket_timeout": 30,
        "socket_connect_timeout": 5,
        "retry": Retry(NoBackoff(), 0),  # the sink's query retries
    }
    if settings.ca_file:
        options["ssl_ca_certs"] = settings.ca_file
    with translated_errors(settings.name):
        if settings.cluster:
            return redis.RedisCluster.from_url(settings.url, **options)  # type: ignore[return-value]
        return redis.Redis.from_url(settings.url, redis_connect_func=_connect_once, **options)


def _connect_once(connection: Any) -> None:  # noqa: ANN401 - redis has a class for each kind of connection
    """Complete the connection, or raise ConnectionError if it was connected before.

    redis-py would reconnect without notice, perhaps to a replica that lacks acknowledged writes: a partial row written
    there would keep columns that are too old. After an error Millrace checks the store first.
    """
    if getattr(connection, "millrace_connected", False):
        raise redis.ConnectionError("the connection was lost")
    connection.on_connect()
    connection.millrace_connected = True


def _script(settings: RedisSettings, client: "redis.Redis") -> Script:
    row, tombstone = settings.ttl_seconds * 1000, settings.tombstone_seconds * 1000
    lifetimes = (row, row + tombstone if row and tombstone else 0, tombstone)
    return Script(client, (settings.form, *lifetimes, settings.channel), settings.chunk, settings.cluster)


@dataclass(frozen=True, slots=True)
class PartialRow:
    """A row without its unchanged columns, which are read from the stored row."""

    key: str
    version: int
    image: str
    unchanged: Sequence[str]


class RedisSink:
    """See cdc.ports.Sink."""

    def __init__(self, settings: RedisSettings, client: "redis.Redis") -> None:
        self._settings = settings
        self._client = client
        self._format = ROW_FORMATS[settings.form]
        self._script = _script(settings, client)
        self._names: dict[TableId, Names] = {}
        self._truncated: dict[TableId, int] = {}
        self._mark = StoreMark(client, settings.prefix, settings.name, settings.mode != "invalidate")
        with translated_errors(settings.name):
            client.ping()

    @property
    def name(self) -> str:
        return self._settings.name

    def facts(self) -> Mapping[str, str]:
        """The eviction policy, for the operator: rows and versions may be evicted unless it is noeviction."""
        try:
            policy = str(self._client.info("memory").get("maxmemory_policy", "unknown"))
        except RedisError:
            policy = "unknown"
        facts = {"eviction policy": policy}
        if self._settings.lookups and policy not in ("noeviction", "unknown"):
            facts["lookups"] = "may contain rows that were evicted, or lack rows: use noeviction"
        return facts

    def prepare(self, schema: TableSchema) -> None:
        names = self._names_of(schema)
        self._check_names(schema, names)
        self._check_lookups(schema, names)
        with translated_errors(self.name):
            truncated = self._client.get(names.truncated)
        self._truncated[schema.table] = int(truncated, 16) if truncated else 0
        self._names[schema.table] = names

    def _names_of(self, schema: TableSchema) -> Names:
        return Names.of(schema, self._settings.prefix, self._settings.template(schema.table))

    def _check_names(self, schema: TableSchema, names: Names) -> None:
        for table, other in self._names.items():
            if table != schema.table and other.pattern() == names.pattern():
                raise SinkError(
                    f"sink {self.name!r}: {table} and {schema.table} would have the same keys.",
                    "Use {schema} and {table} in `key`, or give them different names in `keys`.",
                )

    def _check_lookups(self, schema: TableSchema, names: Names) -> None:
        lookups = self._settings.lookups.get(str(schema.table), ())
        known = {column.name for column in schema.columns}
        for column in lookups:
            if column not in known:
                raise SinkError(
                    f"sink {self.name!r}: lookups name column {column!r}, which {schema.table} does not have.",
                    f"Its columns: {', '.join(sorted(known))}.",
                )
        if lookups and self._settings.cluster and not names.one_slot:
            raise SinkError(
                f"sink {self.name!r}: the rows of {schema.table} and its lookups are in different cluster slots.",
                'Give its keys one hash tag, for instance keys: {"schema.table": "{{schema}.{table}}:{key}"}.',
            )

    def apply(self, batch: Batch) -> None:
        with translated_errors(self.name):
            self._truncate(batch.schema.table, batch.truncated)
            for removal in batch.removed:
                self._remove(batch.schema.table, removal)
            refused = self._write(batch.schema, not_before(batch.rows, self._truncated[batch.schema.table]))
        if refused:
            raise Rejected(refused)

    def _write(self, schema: TableSchema, rows: pa.Table) -> list[RejectedItem]:
        names = self._names[schema.table]
        if self._settings.mode == "invalidate":
            changed = zip(*columns(rows, "key", "version"), strict=True)
            self._script.write(names, [Write(names.row(key), _hex(version), "d", b"") for key, version in changed])
            return []
        partial, whole = partial_first(rows)
        return [*self._write_whole(schema, names, whole), *self._write_partial(schema, names, partial)]

    def _write_whole(self, schema: TableSchema, names: Names, rows: pa.Table) -> list[RejectedItem]:
        writes: list[Write] = []
        refused: list[RejectedItem] = []
        lookups = self._settings.lookups.get(str(schema.table), ())
        images = rows.column("after").cast(pa.binary()).to_pylist()
        row_names = names.rows(rows.column("key"))
        for row, op, version, image in zip(row_names, *columns(rows, "op", "version"), images, strict=True):
            value = b"" if op == "d" else self._format.value(image or b"{}")
            if len(value) > _LARGEST_VALUE:
                key = rows.column("key")[len(writes) + len(refused)].as_py()
                refused.append(
                    RejectedItem(str(schema.table), key, version, "larger than the 512 MB that Redis accepts")
                )
                continue
            sets = names.sets(lookups, image.decode()) if lookups and op != "d" else ""
            writes.append(Write(row, _hex(version), op, value, b"", sets))
        self._script.write(names, writes)
        return refused

    def _write_partial(self, schema: TableSchema, names: Names, rows: pa.Table) -> list[RejectedItem]:
        """Read the unchanged columns, then write unless the row changed in between; in pieces of limited size."""
        partial = list(starmap(PartialRow, zip(*columns(rows, "key", "version", "after", "unchanged"), strict=True)))
        refused: list[RejectedItem] = []
        for start in range(0, len(partial), _SCAN):
            some = partial[start : start + _SCAN]
            for piece in by_bytes(zip(some, self._sizes(names, some), strict=True)):
                refused += self._write_piece(schema, names, piece)
        return refused

    def _write_piece(self, schema: TableSchema, names: Names, waiting: Sequence[PartialRow]) -> list[RejectedItem]:
        """Write one piece; rows that another client changed in between are read again."""
        lookups = self._settings.lookups.get(str(schema.table), ())
        refused: list[RejectedItem] = []
        for _ in range(_ROUNDS):
            writes, sources = [], []
            for row, (mark, stored) in zip(waiting, self._read(names, waiting), strict=True):
                if mark and mark[:16] >= b"%016x" % row.version:
                    continue
                exists = mark and mark[16:17] != b"d"
                value = self._format.merged(stored, row.image, row.unchanged) if exists else None
                if value is None:
                    refused.append(RejectedItem(str(schema.table), row.key, row.version, STORED_ROW_MISSING))
                else:
                    sets = names.sets(lookups, value.decode()) if lookups else ""
                    writes.append(Write(names.row(row.key), _hex(row.version), "u", value, mark, sets))
                    sources.append(row)
            waiting = [sources[index] for index in self._script.write(names, writes)]
            if not waiting:
                return refused
        raise Busy(
            f"sink {self.name!r}: {len(waiting)} row(s) are being changed by another client.", "Millrace retries."
        )

    def _sizes(self, names: Names, rows: Sequence[PartialRow]) -> list[int]:
        """How many bytes `_read` would return for each row."""
        pipeline = self._client.pipeline(transaction=False)
        counts = []
        for row in rows:
            commands = self._format.size_commands(names.row(row.key), row.unchanged)
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            counts.append(len(commands))
        replies = iter(pipeline.execute())
        return [sum(islice(replies, count)) + len(row.image) for row, count in zip(rows, counts, strict=True)]

    def _read(self, names: Names, rows: Sequence[PartialRow]) -> list[tuple[bytes, StoredValue]]:
        pipeline = self._client.pipeline(transaction=False)
        for row in rows:
            name = names.row(row.key)
            pipeline.get(names.version(name))
            pipeline.execute_command(*self._format.read_command(name, row.unchanged))  # type: ignore[no-untyped-call]
        replies = pipeline.execute()
        stored = (self._format.stored(reply, row.unchanged) for row, reply in zip(rows, replies[1::2], strict=True))
        return [(mark or b"", value) for mark, value in zip(replies[::2], stored, strict=True)]

    def _truncate(self, table: TableId, version: int) -> None:
        if version <= self._truncated[table]:
            return
        names = self._names[table]
        for chunk in self._scan(names, self._settings.chunk):
            self._script.write(names, [Write(name, _hex(version), "d", b"") for name in chunk])
        self._client.set(names.truncated, _hex(version))
        self._truncated[table] = version

    def _remove(self, table: TableId, removal: Removal) -> None:
        """Delete the rows of a range; the script skips those with a newer version."""
        names = self._names[table]
        for chunk in self._scan(names, _SCAN):
            rows = [
                name for name in chunk if names.row_name.fullmatch(name)
            ]  # not rows under an earlier key of the table
            removed = removal.range.contains(names.parts(rows)).nonzero()[0].tolist()
            self._script.write(names, [Write(rows[index], _hex(removal.version), "d", b"") for index in removed])

    def _scan(self, names: Names, size: int) -> Iterator[list[str]]:
        """Names of the table's rows and tombstones, in lists of `size`; a name may occur twice.

        Only the version key proves that Millrace wrote a row. In mode `invalidate` the application writes rows, under
        the names of the table's rows: then those are found too.
        """
        found: list[str] = []
        inner = self._inner(names)
        for pattern in self._patterns(names):
            for key in self._client.scan_iter(match=pattern, count=_SCAN):
                if row := names.row_found(key, inner):
                    found.append(row)
                if len(found) >= size:
                    yield found
                    found = []
        if found:
            yield found

    def _inner(self, names: Names) -> list[Names]:
        """The tables whose rows match this one's template too: those in the settings, and those prepared so far."""
        tables = self._settings.templates()
        named = [Names.of(TableSchema(table, ()), self._settings.prefix, tables[table]) for table in tables]
        return [other for other in (*named, *self._names.values()) if names.covers(other)]

    def _patterns(self, names: Names) -> Sequence[str]:
        return (names.pattern(), names.pattern(versions=False))[: 2 if self._settings.mode == "invalidate" else 1]

    def stored(self, schema: TableSchema) -> pa.Table:
        return in_key_order(self.stored_pieces(schema))

    def stored_pieces(self, schema: TableSchema, keys: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """See cdc.ports.StoredPieces. `keys` are names in Redis."""
        if self._settings.mode == "invalidate":
            raise SinkError(
                f"sink {self.name!r} stores no rows to compare: it only invalidates.",
                "Name the sinks to compare: millrace verify --sink …",
            )
        with translated_errors(self.name):
            yield from self._rows(schema).pieces(keys)

    def _rows(self, schema: TableSchema) -> RedisRows:
        names = self._names_of(schema)
        return RedisRows(self._client, schema, names, self._format, self._settings.cluster, self._inner(names))

    def stored_key(self, schema: TableSchema, key: str) -> StoredKey:
        """See sinks.rows.stored_key.KeyReader. In mode `invalidate` a row is there if the application wrote it."""
        names = self._names_of(schema)
        row = names.row(key)
        with translated_errors(self.name):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.get(names.version(row))
            pipeline.exists(row)
            mark, found = pipeline.execute()
        version = int(mark[:16], 16) if mark else 0
        return StoredKey("there" if found else "deleted" if mark else "absent", version, row)

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        return in_key_order([self._rows(schema).expected(images)])

    def mark_table(self, schema: TableSchema) -> Mark:
        """See sinks.fingerprints.Fingerprinted."""
        with translated_errors(self.name):
            return self._mark.mark_table()

    def compare_marks(self, known: Mapping[TableId, Mark], reached: Lsn) -> Mapping[TableId, Mark | Difference]:
        """See sinks.fingerprints.Fingerprinted."""
        with translated_errors(self.name):
            return self._mark.compare_marks(known, reached)

    def record_position(self, reached: Lsn) -> None:
        """See sinks.fingerprints.Positioned."""
        with translated_errors(self.name):
            self._mark.record_position(reached)

    def recreate(self, schema: TableSchema) -> None:
        """See sinks.fingerprints.Fingerprinted. Versions are deleted too: the rows that follow may have older ones."""
        names = self._names_of(schema)
        with translated_errors(self.name):
            for chunk in self._scan(names, self._settings.chunk):
                self._delete([key for row in chunk for key in (row, names.version(row))])
            sets = self._client.scan_iter(match=f"{escaped(names.lookups)}:*", count=_SCAN)
            self._delete([*sets, names.truncated])
        self._truncated.pop(schema.table, None)

    def _delete(self, keys: Sequence[str | bytes]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.delete(key)
        pipeline.execute()

    def close(self) -> None:
        self._client.close()


def _hex(version: int) -> str:
    """The version as the script compares it."""
    return f"{version:016x}"

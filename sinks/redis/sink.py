"""Redis: a row is one key, its version another beside it, both written by one script call per few hundred rows.

A row is JSON text as the log has it, or a hash with one text field per column (nulls left out). A deleted row leaves
its version behind as a tombstone that expires: keep it for longer than a replay reaches back. A cache that evicts may
lose rows and versions; rows come back with their next change or a replay, and `facts` says which policy was found.

In mode `invalidate` every change only deletes the row's key and leaves its version: the application fills the cache.
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
from sinks.redis.errors import faults
from sinks.redis.fingerprint import StoreMark
from sinks.redis.keys import Names, escaped
from sinks.redis.row_formats import FORMS, StoredValue
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

SETTINGS = RedisSettings


def open_sink(settings: RedisSettings, context: SinkContext) -> Sink:
    """Connect and look at the server once, so that wrong credentials show at the start."""
    return RedisSink(settings, _client(settings))


def _client(settings: RedisSettings) -> "redis.Redis":
    options: dict[str, Any] = {
        "username": settings.username or None,
        "password": settings.password.reveal() or None,
        "socket_timeout": 30,
        "socket_connect_timeout": 5,
        "retry": Retry(NoBackoff(), 0),  # the query decides when to try again
    }
    if settings.ca_file:
        options["ssl_ca_certs"] = settings.ca_file
    with faults(settings.name):
        if settings.cluster:
            return redis.RedisCluster.from_url(settings.url, **options)  # type: ignore[return-value]
        return redis.Redis.from_url(settings.url, redis_connect_func=_connected_once, **options)


def _connected_once(connection: Any) -> None:  # noqa: ANN401 - redis has a class for each kind of connection
    """Greet the server, unless this connection was lost before.

    redis-py would connect again in silence, perhaps to a replica that lacks acknowledged writes: a partial row written
    there would keep columns that are too old. As an error, the loss has the store looked at first.
    """
    if getattr(connection, "millrace_connected", False):
        raise redis.ConnectionError("the connection was lost")
    connection.on_connect()
    connection.millrace_connected = True


def _script(settings: RedisSettings, client: "redis.Redis") -> Script:
    row, tombstone = settings.ttl_seconds * 1000, settings.tombstone_seconds * 1000
    lives = (row, row + tombstone if row and tombstone else 0, tombstone)
    return Script(client, (settings.form, *lives, settings.channel), settings.chunk, settings.cluster)


@dataclass(frozen=True, slots=True)
class PartialRow:
    """A row that keeps columns of the stored one."""

    key: str
    version: int
    image: str
    unchanged: Sequence[str]


class RedisSink:
    """See cdc.ports.Sink."""

    def __init__(self, settings: RedisSettings, client: "redis.Redis") -> None:
        self._settings = settings
        self._client = client
        self._form = FORMS[settings.form]
        self._script = _script(settings, client)
        self._names: dict[TableId, Names] = {}
        self._truncated: dict[TableId, int] = {}
        self._mark = StoreMark(client, settings.prefix, settings.name, settings.mode != "invalidate")
        with faults(settings.name):
            client.ping()

    @property
    def name(self) -> str:
        return self._settings.name

    def facts(self) -> Mapping[str, str]:
        """What an operator should know: rows and versions may vanish under any policy but noeviction."""
        try:
            policy = str(self._client.info("memory").get("maxmemory_policy", "unknown"))
        except RedisError:
            policy = "unknown"
        facts = {"eviction policy": policy}
        if self._settings.lookups and policy not in ("noeviction", "unknown"):
            facts["lookups"] = "may name rows that were evicted, or lack some: use noeviction"
        return facts

    def prepare(self, schema: TableSchema) -> None:
        names = Names.of(schema, self._settings.prefix, self._settings.template(schema.table))
        self._check_names(schema, names)
        self._check_lookups(schema, names)
        with faults(self.name):
            held = self._client.get(names.truncated)
        self._truncated[schema.table] = int(held, 16) if held else 0
        self._names[schema.table] = names

    def _check_names(self, schema: TableSchema, names: Names) -> None:
        for table, other in self._names.items():
            if table != schema.table and other.pattern() == names.pattern():
                raise SinkError(
                    f"sink {self.name!r}: {table} and {schema.table} would share their keys.",
                    "Use {schema} and {table} in `key`, or name them apart in `keys`.",
                )

    def _check_lookups(self, schema: TableSchema, names: Names) -> None:
        asked = self._settings.lookups.get(str(schema.table), ())
        known = {column.name for column in schema.columns}
        for column in asked:
            if column not in known:
                raise SinkError(
                    f"sink {self.name!r}: lookups name column {column!r}, which {schema.table} does not have.",
                    f"Its columns: {', '.join(sorted(known))}.",
                )
        if asked and self._settings.cluster and not names.together:
            raise SinkError(
                f"sink {self.name!r}: the rows of {schema.table} lie in many slots, and its lookups in others.",
                'Give its keys one hash tag, for instance keys: {"schema.table": "{{schema}.{table}}:{key}"}.',
            )

    def apply(self, batch: Batch) -> None:
        with faults(self.name):
            self._truncate(batch.schema.table, batch.truncated)
            for removal in batch.removed:
                self._remove(batch.schema.table, removal)
            refused = self._written(batch.schema, not_before(batch.rows, self._truncated[batch.schema.table]))
        if refused:
            raise Rejected(refused)

    def _written(self, schema: TableSchema, rows: pa.Table) -> list[RejectedItem]:
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
        places = names.rows(rows.column("key"))
        for row, op, version, image in zip(places, *columns(rows, "op", "version"), images, strict=True):
            value = b"" if op == "d" else self._form.value(image or b"{}")
            if len(value) > _LARGEST_VALUE:
                key = rows.column("key")[len(writes) + len(refused)].as_py()
                refused.append(RejectedItem(str(schema.table), key, version, "larger than the 512 MB that Redis takes"))
                continue
            sets = names.sets(lookups, image.decode()) if lookups and op != "d" else ""
            writes.append(Write(row, f"{version:016x}", op, value, b"", sets))
        self._script.write(names, writes)
        return refused

    def _write_partial(self, schema: TableSchema, names: Names, rows: pa.Table) -> list[RejectedItem]:
        """Read, fill the gaps, write if nobody wrote in between, in pieces by the size of what is stored."""
        partial = list(starmap(PartialRow, zip(*columns(rows, "key", "version", "after", "unchanged"), strict=True)))
        refused: list[RejectedItem] = []
        for start in range(0, len(partial), _SCAN):
            some = partial[start : start + _SCAN]
            for piece in by_bytes(zip(some, self._sizes(names, some), strict=True)):
                refused += self._write_piece(schema, names, piece)
        return refused

    def _write_piece(self, schema: TableSchema, names: Names, waiting: Sequence[PartialRow]) -> list[RejectedItem]:
        """One piece; what somebody else did write in between is looked at again."""
        lookups = self._settings.lookups.get(str(schema.table), ())
        refused: list[RejectedItem] = []
        for _ in range(_ROUNDS):
            writes, sources = [], []
            for row, (mark, held) in zip(waiting, self._read(names, waiting), strict=True):
                if mark and mark[:16] >= b"%016x" % row.version:
                    continue
                known = mark and mark[16:17] != b"d"
                value = self._form.merged(held, row.image, row.unchanged) if known else None
                if value is None:
                    refused.append(RejectedItem(str(schema.table), row.key, row.version, STORED_ROW_MISSING))
                else:
                    sets = names.sets(lookups, value.decode()) if lookups else ""
                    writes.append(Write(names.row(row.key), _hex(row.version), "u", value, mark, sets))
                    sources.append(row)
            waiting = [sources[place] for place in self._script.write(names, writes)]
            if not waiting:
                return refused
        raise Busy(f"sink {self.name!r}: {len(waiting)} row(s) are being changed by somebody else.")

    def _sizes(self, names: Names, rows: Sequence[PartialRow]) -> list[int]:
        """Bytes that `_read` would bring of each row."""
        pipeline = self._client.pipeline(transaction=False)
        counts = []
        for row in rows:
            commands = self._form.sizes(names.row(row.key), row.unchanged)
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
            pipeline.execute_command(*self._form.kept(name, row.unchanged))  # type: ignore[no-untyped-call]
        replies = pipeline.execute()
        held = (self._form.held(reply, row.unchanged) for row, reply in zip(rows, replies[1::2], strict=True))
        return [(mark or b"", value) for mark, value in zip(replies[::2], held, strict=True)]

    def _truncate(self, table: TableId, version: int) -> None:
        if version <= self._truncated[table]:
            return
        names = self._names[table]
        for chunk in self._scan(names, self._settings.chunk):
            self._script.write(names, [Write(name, _hex(version), "d", b"") for name in chunk])
        self._client.set(names.truncated, _hex(version))
        self._truncated[table] = version

    def _remove(self, table: TableId, removal: Removal) -> None:
        """Delete the rows of a range; the script leaves those with a newer version alone."""
        names = self._names[table]
        for chunk in self._scan(names, _SCAN):
            rows = [name for name in chunk if names.shape.fullmatch(name)]  # not those of a key that it had before
            held = removal.range.holds(names.parts(rows)).nonzero()[0].tolist()
            self._script.write(names, [Write(rows[place], _hex(removal.version), "d", b"") for place in held])

    def _scan(self, names: Names, size: int) -> Iterator[list[str]]:
        """Names of the table's rows, also of those that left only a version; a name may come twice.

        Only a version proves that a row is ours. In mode `invalidate` rows are the application's by agreement, under
        the names that rows of the table have: then those are found too.
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
        """The tables whose rows' names fit this one's template too. What is configured is known before any batch."""
        tables = {TableId.parse(text): template for text, template in self._settings.keys.items()}
        named = [Names.of(TableSchema(table, ()), self._settings.prefix, tables[table]) for table in tables]
        return [other for other in (*named, *self._names.values()) if names.holds(other)]

    def _patterns(self, names: Names) -> Sequence[str]:
        return (names.pattern(), names.pattern(versions=False))[: 2 if self._settings.mode == "invalidate" else 1]

    def stored(self, schema: TableSchema) -> pa.Table:
        return in_key_order(self.stored_pieces(schema))

    def stored_pieces(self, schema: TableSchema, keys: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """See cdc.ports.StoredPieces. A row is known by its name in Redis."""
        if self._settings.mode == "invalidate":
            raise SinkError(
                f"sink {self.name!r} keeps no rows of its own to compare: it only invalidates.",
                "Name the sinks to compare: millrace verify --sink …",
            )
        with faults(self.name):
            yield from self._rows(schema).pieces(keys)

    def _rows(self, schema: TableSchema) -> RedisRows:
        names = Names.of(schema, self._settings.prefix, self._settings.template(schema.table))
        return RedisRows(self._client, schema, names, self._form, self._settings.cluster, self._inner(names))

    def held(self, schema: TableSchema, key: str) -> StoredKey:
        """See `stored_key.Shows`. Where changes only invalidate, a row is there if the application put it there."""
        names = Names.of(schema, self._settings.prefix, self._settings.template(schema.table))
        row = names.row(key)
        with faults(self.name):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.get(names.version(row))
            pipeline.exists(row)
            mark, found = pipeline.execute()
        version = int(mark[:16], 16) if mark else 0
        return StoredKey("there" if found else "deleted" if mark else "absent", version, row)

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        return in_key_order([self._rows(schema).expected(images)])

    def sign(self, schema: TableSchema) -> Mark:
        """See sinks.fingerprints.Fingerprinted."""
        with faults(self.name):
            return self._mark.sign()

    def look(self, known: Mapping[TableId, Mark], reached: Lsn) -> Mapping[TableId, Mark | Difference]:
        """See sinks.fingerprints.Fingerprinted."""
        with faults(self.name):
            return self._mark.look(known, reached)

    def passed(self, reached: Lsn) -> None:
        """See sinks.fingerprints.Positioned."""
        with faults(self.name):
            self._mark.passed(reached)

    def renew(self, schema: TableSchema) -> None:
        """See sinks.fingerprints.Fingerprinted. Versions go with their rows: those that follow may have older ones."""
        names = Names.of(schema, self._settings.prefix, self._settings.template(schema.table))
        with faults(self.name):
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
    """As the script compares it."""
    return f"{version:016x}"

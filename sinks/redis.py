"""Redis: a row is one key, its version another beside it, both written by one script call per few hundred rows.

A row is JSON text as the log has it, or a hash with one text field per column (nulls left out). A deleted row leaves
its version behind as a tombstone that expires: keep it for longer than a replay reaches back. A cache that evicts may
lose rows and versions; rows come back with their next change or a replay, and `facts` says which policy was found.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import starmap
from typing import Any, Literal

import pyarrow as pa
import redis
from pydantic import Field, field_validator
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from cdc.config import SecretField, SinkSettings
from cdc.errors import Busy, Rejected, RejectedItem, SinkError
from cdc.model import TableId, TableSchema
from cdc.ports import Batch, Sink
from cdc.secret import Secret
from sinks.context import SinkContext
from sinks.images import STORED_ROW_MISSING, arranged, columns, key_of, not_before, ordered, partial_first
from sinks.redis_faults import faults
from sinks.redis_forms import FORMS, Held
from sinks.redis_keys import Names

_SCRIPT = files("sinks").joinpath("redis_apply.lua").read_bytes()
_SHA = hashlib.sha1(_SCRIPT).hexdigest()  # noqa: S324  Redis names scripts by it
_CHUNK_BYTES = 16 << 20  # a client's whole query is limited to 1 GB, and the server stands still during a call
_LARGEST_VALUE = 512 << 20  # proto-max-bulk-len
_ROUNDS = 5


class RedisSettings(SinkSettings):
    """A Redis server or cluster."""

    kind: Literal["redis"] = "redis"
    url: str = "redis://127.0.0.1:6379/0"
    """redis:// or rediss:// (TLS); without a password in it."""
    username: str = ""
    password: SecretField = Secret("")
    ca_file: str = ""
    """Certificate authority for rediss://, if not the system's."""
    cluster: bool = False
    prefix: str = ""
    """Put before every key."""
    key: str = "{schema}.{table}:{key}"
    """Name of a row's key."""
    keys: dict[str, str] = Field(default_factory=dict)
    """Names for single tables: `public.users: "user:{key}"`."""
    form: Literal["json", "hash"] = "json"
    """A row as JSON text, or as a hash of text fields."""
    ttl_seconds: int = Field(0, ge=0)
    """Rows expire after this long without a change; 0 keeps them."""
    tombstone_seconds: int = Field(7 * 24 * 3600, ge=0)
    """How long a deleted row is remembered; 0 for ever."""
    chunk: int = Field(500, ge=1, le=3000)
    """Rows per script call. Redis serves nobody else meanwhile."""

    @field_validator("url")
    @classmethod
    def _no_password(cls, url: str) -> str:
        if "@" in url:
            raise ValueError("the url holds credentials; use username and password instead")
        return url

    @field_validator("key")
    @classmethod
    def _has_key(cls, template: str) -> str:
        if template.count("{key}") != 1:
            raise ValueError("the name of a row's key needs {key} once")
        return template

    @field_validator("keys")
    @classmethod
    def _have_keys(cls, templates: dict[str, str]) -> dict[str, str]:
        return {str(TableId.parse(table)): cls._has_key(template) for table, template in templates.items()}


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
        return redis.Redis.from_url(settings.url, **options)


@dataclass(frozen=True, slots=True)
class Write:
    """One row for the script."""

    name: str
    version: str
    op: str
    value: bytes
    expected: bytes = b""


@dataclass(frozen=True, slots=True)
class Partial:
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
        self._names: dict[TableId, Names] = {}
        self._truncated: dict[TableId, int] = {}
        with faults(settings.name):
            client.ping()

    @property
    def name(self) -> str:
        return self._settings.name

    def facts(self) -> Mapping[str, str]:
        """What an operator should know: rows and versions may vanish under any policy but noeviction."""
        try:
            memory = self._client.info("memory")
        except RedisError:
            return {"eviction policy": "unknown"}
        return {"eviction policy": str(memory.get("maxmemory_policy", "unknown"))}

    def prepare(self, schema: TableSchema) -> None:
        template = self._settings.keys.get(str(schema.table), self._settings.key)
        names = Names.of(schema, self._settings.prefix, template)
        for table, other in self._names.items():
            if table != schema.table and other.patterns() == names.patterns():
                raise SinkError(
                    f"sink {self.name!r}: {table} and {schema.table} would share their keys.",
                    "Use {schema} and {table} in `key`, or name them apart in `keys`.",
                )
        with faults(self.name):
            held = self._client.get(names.truncated)
        self._truncated[schema.table] = int(held, 16) if held else 0
        self._names[schema.table] = names

    def apply(self, batch: Batch) -> None:
        with faults(self.name):
            self._truncate(batch.schema.table, batch.truncated)
            rows = not_before(batch.rows, self._truncated[batch.schema.table])
            partial, whole = partial_first(rows)
            names = self._names[batch.schema.table]
            refused = self._write_whole(batch.schema, names, whole)
            refused += self._write_partial(batch.schema, names, partial)
        if refused:
            raise Rejected(refused)

    def _write_whole(self, schema: TableSchema, names: Names, rows: pa.Table) -> list[RejectedItem]:
        writes, refused = [], []
        images = rows.column("after").cast(pa.binary()).to_pylist()
        for key, op, version, image in zip(*columns(rows, "key", "op", "version"), images, strict=True):
            value = b"" if op == "d" else self._form.value(image or b"{}")
            if len(value) > _LARGEST_VALUE:
                refused.append(RejectedItem(str(schema.table), key, version, "larger than the 512 MB that Redis takes"))
            else:
                writes.append(Write(names.row(key), f"{version:016x}", op, value))
        self._write(names, writes)
        return refused

    def _write_partial(self, schema: TableSchema, names: Names, rows: pa.Table) -> list[RejectedItem]:
        """Read, fill the gaps, write if nobody wrote in between; what somebody did write is looked at again."""
        waiting = list(starmap(Partial, zip(*columns(rows, "key", "version", "after", "unchanged"), strict=True)))
        refused: list[RejectedItem] = []
        for _ in range(_ROUNDS):
            writes, sources = [], []
            for row, (mark, held) in zip(waiting, self._read(names, waiting), strict=True):
                if mark and mark[:16] >= b"%016x" % row.version:
                    continue
                value = self._form.merged(held, row.image, row.unchanged) if mark and len(mark) == 16 else None
                if value is None:
                    refused.append(RejectedItem(str(schema.table), row.key, row.version, STORED_ROW_MISSING))
                else:
                    writes.append(Write(names.row(row.key), f"{row.version:016x}", "u", value, mark))
                    sources.append(row)
            waiting = [sources[place] for place in self._write(names, writes)]
            if not waiting:
                return refused
        raise Busy(f"sink {self.name!r}: {len(waiting)} row(s) are being changed by somebody else.")

    def _read(self, names: Names, rows: Sequence[Partial]) -> list[tuple[bytes, Held]]:
        pipeline = self._client.pipeline(transaction=False)
        for row in rows:
            name = names.row(row.key)
            pipeline.get(names.version(name))
            pipeline.execute_command(self._form.read, name)  # type: ignore[no-untyped-call]
        replies = pipeline.execute()
        return [(replies[at] or b"", replies[at + 1]) for at in range(0, len(replies), 2)]

    def _write(self, names: Names, writes: Sequence[Write]) -> list[int]:
        """Send the rows in chunks; returns the places of those whose expectation failed."""
        missed: list[int] = []
        for places in self._chunks(names, writes):
            chunk = [writes[place] for place in places]
            keys = [name for write in chunk for name in (write.name, names.version(write.name))]
            values = [part for write in chunk for part in (write.version, write.op, write.expected, write.value)]
            missed += [places[place - 1] for place in self._evaluate(keys, values)]
        return missed

    def _chunks(self, names: Names, writes: Sequence[Write]) -> Iterator[list[int]]:
        groups: dict[int, list[int]] = {0: list(range(len(writes)))}
        if self._settings.cluster:
            groups = {}
            for place, write in enumerate(writes):
                groups.setdefault(names.slot(write.name), []).append(place)
        for places in groups.values():
            chunk, size = [], 0
            for place in places:
                chunk.append(place)
                size += len(writes[place].value)
                if len(chunk) >= self._settings.chunk or size >= _CHUNK_BYTES:
                    yield chunk
                    chunk, size = [], 0
            if chunk:
                yield chunk

    def _evaluate(self, keys: Sequence[str], values: Sequence[object]) -> list[int]:
        row = self._settings.ttl_seconds * 1000
        tombstone = self._settings.tombstone_seconds * 1000
        lives = (row, row + tombstone if row and tombstone else 0, tombstone)
        arguments = (len(keys), *keys, self._form.name, *lives, *values)
        try:
            return list(self._client.evalsha(_SHA, *arguments))  # type: ignore[arg-type]
        except NoScriptError:  # restarted, failed over or flushed
            return list(self._client.eval(_SCRIPT.decode(), *arguments))  # type: ignore[arg-type]

    def _truncate(self, table: TableId, version: int) -> None:
        if version <= self._truncated[table]:
            return
        names = self._names[table]
        for chunk in self._scan(names, self._settings.chunk):
            self._write(names, [Write(name, f"{version:016x}", "d", b"") for name in chunk])
        self._client.set(names.truncated, f"{version:016x}")
        self._truncated[table] = version

    def _scan(self, names: Names, size: int) -> Iterator[list[str]]:
        """Names of the table's rows, also of those that left only a version; a name may come twice."""
        found: list[str] = []
        for pattern in names.patterns():
            for key in self._client.scan_iter(match=pattern, count=1000):
                name = key.decode()
                found.append(name if names.is_row(name) else names.row_of(name))
                if len(found) >= size:
                    yield found
                    found = []
        if found:
            yield found

    def stored(self, schema: TableSchema) -> pa.Table:
        names = Names.of(schema, self._settings.prefix, self._settings.keys.get(str(schema.table), self._settings.key))
        rows: dict[str, str] = {}
        with faults(self.name):
            for chunk in self._scan(names, 1000):
                pipeline = self._client.pipeline(transaction=False)
                for name in chunk:
                    pipeline.execute_command(self._form.read, name)  # type: ignore[no-untyped-call]
                for held in pipeline.execute():
                    if held:
                        image = self._form.image(held)
                        rows[key_of(schema, image)] = arranged(schema, image)
        return ordered(rows.items())

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        shown = map(self._form.shown, columns(images, "after")[0])
        return ordered((key_of(schema, row), arranged(schema, row)) for row in shown)

    def close(self) -> None:
        self._client.close()
